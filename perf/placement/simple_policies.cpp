// The policies beside PegaFlow's, after their published formulas. They see the nodes exactly and at
// once, which is kinder than their real sources.

#include <algorithm>
#include <array>
#include <limits>

#include "perf/lib/random_draws.h"
#include "perf/placement/sim_policy.h"

namespace pegaflow::perf {
namespace {

constexpr std::array kNames = {"round-robin",    "round-robin+pull",    "least-load",
                               "shortest-queue", "shortest-queue+pull", "smg",
                               "llm-d"};
// SMG's cache_aware: its defaults.
constexpr double kSmgMatch = 0.3;
constexpr std::uint32_t kSmgAbsolute = 64;
constexpr double kSmgRelative = 1.5;
// llm-d's scorers: prefix cache, queue, KV use.
constexpr double kLlmdPrefix = 3;
constexpr double kLlmdQueue = 2;
constexpr double kLlmdKv = 2;

/// The node with the least `cost`; one of the equals by chance.
template <typename Cost>
std::uint32_t least(std::size_t count, Draws& draws, const Cost& cost) {
  double best = std::numeric_limits<double>::infinity();
  std::uint32_t chosen = 0;
  std::uint64_t equals = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const double its_cost = cost(i);
    if (its_cost > best) continue;
    if (its_cost < best) equals = 0;
    best = its_cost;
    if (draws.below(++equals) == 0) chosen = i;
  }
  return chosen;
}

/// The other node with the longest prefix, if node `to` gains by pulling from it.
std::int64_t source_for(const SimNode& to, const PlaceRequest& request,
                        const std::vector<SimNode>& nodes, double now) {
  std::int64_t source = -1;
  std::size_t longest = 0;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const std::size_t prefix = nodes[i].pool_prefix(request, now);
    if (prefix <= longest) continue;
    longest = prefix;
    source = static_cast<std::int64_t>(i);
  }
  return source >= 0 && to.pull_pays(request, nodes[static_cast<std::size_t>(source)], now) ? source
                                                                                            : -1;
}

class RoundRobin final : public SimPolicy {
 public:
  explicit RoundRobin(bool pulls) : pulls_(pulls) {}
  SimChoice choose(std::uint64_t /*id*/, const PlaceRequest& request, std::vector<SimNode>& nodes,
                   double now) override {
    SimChoice choice{.node = static_cast<std::uint32_t>(next_++ % nodes.size())};
    if (pulls_) choice.source = source_for(nodes[choice.node], request, nodes, now);
    return choice;
  }

 private:
  bool pulls_;
  std::uint64_t next_ = 0;
};

class LeastLoad final : public SimPolicy {
 public:
  explicit LeastLoad(std::uint64_t seed) : draws_(seed) {}
  SimChoice choose(std::uint64_t /*id*/, const PlaceRequest& /*request*/,
                   std::vector<SimNode>& nodes, double /*now*/) override {
    return {.node = least(nodes.size(), draws_, [&](std::uint32_t i) {
              return static_cast<double>(nodes[i].waiting + nodes[i].decoding);
            })};
  }

 private:
  Draws draws_;
};

class ShortestQueue final : public SimPolicy {
 public:
  ShortestQueue(bool pulls, std::uint64_t seed) : pulls_(pulls), draws_(seed) {}
  SimChoice choose(std::uint64_t /*id*/, const PlaceRequest& request, std::vector<SimNode>& nodes,
                   double now) override {
    SimChoice choice{
        .node = least(nodes.size(), draws_, [&](std::uint32_t i) { return nodes[i].queue(now); })};
    if (pulls_) choice.source = source_for(nodes[choice.node], request, nodes, now);
    return choice;
  }

 private:
  bool pulls_;
  Draws draws_;
};

/// SMG's cache_aware: the longest match in the trees of what was sent to each worker, unless the
/// loads are unbalanced; without a match the worker with the smallest tree.
class Smg final : public SimPolicy {
 public:
  Smg(std::size_t nodes, const SimHardware& hardware, std::uint64_t seed)
      : trees_(nodes, LruBlocks(hardware.gpu_blocks + hardware.pool_blocks)), draws_(seed) {}
  SimChoice choose(std::uint64_t /*id*/, const PlaceRequest& request, std::vector<SimNode>& nodes,
                   double now) override {
    const auto load = [&](std::uint32_t i) {
      return static_cast<double>(nodes[i].waiting + nodes[i].decoding);
    };
    const std::uint32_t idlest = least(nodes.size(), draws_, load);
    const std::uint32_t busiest =
        least(nodes.size(), draws_, [&](std::uint32_t i) { return -load(i); });
    SimChoice choice{.node = idlest};
    const bool is_unbalanced =
        load(busiest) - load(idlest) > kSmgAbsolute && load(busiest) > kSmgRelative * load(idlest);
    if (!is_unbalanced) {
      const auto match = [&](std::uint32_t i) {
        return static_cast<double>(trees_[i].prefix(request.chain));
      };
      const std::uint32_t longest =
          least(nodes.size(), draws_, [&](std::uint32_t i) { return -match(i); });
      const bool is_match = match(longest) > kSmgMatch * static_cast<double>(request.chain.size());
      choice.node = is_match ? longest : least(nodes.size(), draws_, [&](std::uint32_t i) {
        return static_cast<double>(trees_[i].size());
      });
    }
    trees_[choice.node].use(request.chain, now, evicted_);
    evicted_.clear();
    return choice;
  }

 private:
  std::vector<LruBlocks> trees_;
  std::vector<index::Key> evicted_;
  Draws draws_;
};

/// llm-d's scorers with weights: the share of the prompt in the GPU cache, the queue and the KV use
/// relative to the others.
class Llmd final : public SimPolicy {
 public:
  Llmd(const SimHardware& hardware, std::uint64_t seed) : hardware_(hardware), draws_(seed) {}
  SimChoice choose(std::uint64_t /*id*/, const PlaceRequest& request, std::vector<SimNode>& nodes,
                   double /*now*/) override {
    std::uint32_t fewest = ~0U;
    std::uint32_t most = 0;
    for (const SimNode& node : nodes) {
      fewest = std::min(fewest, node.waiting);
      most = std::max(most, node.waiting);
    }
    return {.node = least(nodes.size(), draws_, [&](std::uint32_t i) {
              const double prefix = static_cast<double>(nodes[i].gpu_prefix(request)) /
                                    static_cast<double>(request.chain.size());
              const double queue =
                  most > fewest ? static_cast<double>(most - nodes[i].waiting) / (most - fewest)
                                : 1;
              const double use = std::min(1.0, static_cast<double>(nodes[i].decoding_blocks) /
                                                   static_cast<double>(hardware_.gpu_blocks));
              return -(kLlmdPrefix * prefix + kLlmdQueue * queue + kLlmdKv * (1 - use));
            })};
  }

 private:
  const SimHardware& hardware_;
  Draws draws_;
};

class Dynamo final : public SimPolicy {
 public:
  Dynamo(const DynamoWeights& weights, std::uint64_t seed) : weights_(weights), draws_(seed) {}
  SimChoice choose(std::uint64_t /*id*/, const PlaceRequest& request, std::vector<SimNode>& nodes,
                   double /*now*/) override {
    return {.node = least(nodes.size(), draws_, [&](std::uint32_t i) {
              const auto gpu = static_cast<double>(nodes[i].gpu_prefix(request));
              const auto local = static_cast<double>(nodes[i].local_prefix(request));
              const double credits =
                  (gpu + weights_.pool_credit * (local - gpu)) * kTraceBlockTokens;
              const double prefill =
                  static_cast<double>(nodes[i].waiting_tokens) + request.input_tokens - credits;
              return weights_.prefill_scale * std::max(0.0, prefill) / kTraceBlockTokens +
                     weights_.decode_scale * static_cast<double>(nodes[i].decoding_blocks);
            })};
  }

 private:
  DynamoWeights weights_;
  Draws draws_;
};

}  // namespace

Result<std::unique_ptr<SimPolicy>> make_simple_policy(std::string_view name, std::size_t nodes,
                                                      const SimHardware& hardware,
                                                      std::uint64_t seed) {
  if (name == "round-robin") return std::make_unique<RoundRobin>(false);
  if (name == "round-robin+pull") return std::make_unique<RoundRobin>(true);
  if (name == "least-load") return std::make_unique<LeastLoad>(seed);
  if (name == "shortest-queue") return std::make_unique<ShortestQueue>(false, seed);
  if (name == "shortest-queue+pull") return std::make_unique<ShortestQueue>(true, seed);
  if (name == "smg") return std::make_unique<Smg>(nodes, hardware, seed);
  if (name == "llm-d") return std::make_unique<Llmd>(hardware, seed);
  std::string names;
  for (const char* const known : kNames) names += (names.empty() ? "" : ", ") + std::string(known);
  return fail(Errc::kInvalidArgument, "there is no policy '{}'; choose from {}, dynamo, pegaflow",
              name, names);
}

std::unique_ptr<SimPolicy> make_dynamo_policy(const DynamoWeights& weights, std::uint64_t seed) {
  return std::make_unique<Dynamo>(weights, seed);
}

std::string parameters_of(std::string_view name) {
  if (name == "smg") {
    return fmt::format("match {}, imbalance {} and {}", kSmgMatch, kSmgAbsolute, kSmgRelative);
  }
  if (name == "llm-d") {
    return fmt::format("prefix {}, queue {}, KV {}", kLlmdPrefix, kLlmdQueue, kLlmdKv);
  }
  return "";
}

}  // namespace pegaflow::perf
