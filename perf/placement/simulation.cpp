#include "perf/placement/simulation.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <utility>

namespace pegaflow::perf {
namespace {

/// An event after a request was placed.
struct Later {
  enum class Kind : std::uint8_t { kChoose, kFirstToken, kDone, kTick };
  double at = 0;
  std::uint64_t order = 0;  ///< Equal times keep the order in which they were planned.
  Kind kind = Kind::kTick;
  std::uint64_t id = 0;
  bool operator>(const Later& other) const {
    return at != other.at ? at > other.at : order > other.order;
  }
};

/// Requests wait less for their placement.
constexpr double kLongestWait = 1;
/// The policy is asked again after this time: a router learns at once when a record arrives.
constexpr double kWaitStep = 0.00005;

struct Placed {
  std::uint32_t node = 0;
  Served served;
  BlockChanges changes;
};

class Simulation {
 public:
  Simulation(const std::vector<PlaceRequest>& requests, SimPolicy& policy, std::size_t nodes,
             const SimHardware& hardware)
      : requests_(requests), policy_(policy), placed_(requests.size()) {
    for (std::size_t i = 0; i < nodes; ++i) {
      nodes_.emplace_back(static_cast<std::uint32_t>(i), hardware);
    }
  }

  SimResult run() {
    if (requests_.empty()) return {};
    plan(requests_.front().at, Later::Kind::kTick, 0);
    for (std::uint64_t id = 0; id < requests_.size(); ++id) {
      const double at = requests_[id].at;
      advance(at);
      arrive(id, at);
    }
    advance(requests_.back().at + kLongestWait);
    // Last events change no figure of the run.
    summarize();
    return std::move(result_);
  }

 private:
  void plan(double at, Later::Kind kind, std::uint64_t id) {
    later_.push({.at = at, .order = planned_++, .kind = kind, .id = id});
  }

  void advance(double until) {
    while (!later_.empty() && later_.top().at <= until) {
      const Later next = later_.top();
      later_.pop();
      policy_.advance(nodes_, next.at);
      if (next.kind == Later::Kind::kTick) {
        plan(next.at + 0.25, Later::Kind::kTick, 0);
      } else if (next.kind == Later::Kind::kChoose) {
        arrive(next.id, next.at);
      } else {
        happen(next);
      }
    }
    policy_.advance(nodes_, until);
  }

  void happen(const Later& next) {
    Placed& placed = placed_[next.id];
    SimNode& node = nodes_[placed.node];
    const std::uint64_t blocks = requests_[next.id].chain.size();
    if (next.kind == Later::Kind::kDone) {
      --node.decoding;
      node.decoding_blocks -= blocks;
      policy_.done(next.id, next.at);
      return;
    }
    --node.waiting;
    node.waiting_tokens -= placed.served.uncached_tokens;
    ++node.decoding;
    node.decoding_blocks += blocks;
    policy_.first_token(next.id, requests_[next.id], placed.node, placed.served);
    policy_.changed(placed.changes, next.at);
    placed.changes = {};
    plan(placed.served.done, Later::Kind::kDone, next.id);
  }

  void arrive(std::uint64_t id, double now) {
    const double wait = policy_.wait(id, requests_[id], now);
    if (wait > 0) {
      plan(now + std::min(wait, kWaitStep), Later::Kind::kChoose, id);
    } else {
      place(id, now);
    }
  }

  void place(std::uint64_t id, double now) {
    const PlaceRequest& request = requests_[id];
    const SimChoice choice = policy_.choose(id, request, nodes_, now);
    Placed& placed = placed_[id];
    placed.node = choice.node;
    SimNode* const source =
        choice.source < 0 ? nullptr : &nodes_[static_cast<std::size_t>(choice.source)];
    SimNode& node = nodes_[choice.node];
    placed.served = node.serve(request, source, now, placed.changes);
    ++node.waiting;
    node.waiting_tokens += placed.served.uncached_tokens;
    plan(placed.served.first_token, Later::Kind::kFirstToken, id);
    count(request, choice, placed.served);
  }

  void count(const PlaceRequest& request, const SimChoice& choice, const Served& served) {
    ++result_.requests;
    result_.blocks += served.blocks;
    result_.hits += served.hits;
    result_.gpu_hits += served.gpu;
    result_.pulled += served.pulled;
    result_.predicted += choice.predicted_blocks;
    result_.mispredicted += choice.predicted_blocks > served.hits
                                ? choice.predicted_blocks - served.hits
                                : served.hits - choice.predicted_blocks;
    const double ttft = served.first_token - request.at;
    result_.ttft.push_back(ttft);
    std::size_t of_class = 0;
    while (request.input_tokens >= kLengthClasses[of_class].below_tokens) ++of_class;
    result_.ttft_of_class[of_class].push_back(ttft);
    end_ = std::max(end_, served.first_token);
  }

  void summarize() {
    double sum = 0;
    double squares = 0;
    for (const SimNode& node : nodes_) {
      sum += node.computed();
      squares += node.computed() * node.computed();
    }
    const auto count = static_cast<double>(nodes_.size());
    const double mean = sum / count;
    if (mean > 0) {
      result_.load_variation = std::sqrt(std::max(0.0, squares / count - mean * mean)) / mean;
    }
    const double length = end_ - requests_.front().at;
    result_.utilization = length > 0 ? mean / length : 0;
  }

  const std::vector<PlaceRequest>& requests_;
  SimPolicy& policy_;
  std::vector<SimNode> nodes_;
  std::vector<Placed> placed_;
  std::priority_queue<Later, std::vector<Later>, std::greater<>> later_;
  std::uint64_t planned_ = 0;
  double end_ = 0;
  SimResult result_;
};

}  // namespace

double SimResult::mean_ttft() const {
  return ttft.empty()
             ? 0
             : std::accumulate(ttft.begin(), ttft.end(), 0.0) / static_cast<double>(ttft.size());
}

SimResult simulate(const std::vector<PlaceRequest>& requests, SimPolicy& policy, std::size_t nodes,
                   const SimHardware& hardware) {
  return Simulation(requests, policy, nodes, hardware).run();
}

}  // namespace pegaflow::perf
