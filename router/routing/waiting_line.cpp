#include "router/routing/waiting_line.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

namespace pegaflow::router {

namespace {

/// The age at which what was served counts a third.
constexpr double kMemorySeconds = 20;

/// Requests that differ in nothing by which engines are refused: if there is none for one of them,
/// there is none for the others.
class Refused {
 public:
  explicit Refused(const Fleet& fleet) : fleet_(fleet) {}
  void add(const Fleet::Request& request) {
    if (is_plain(request)) kinds_.push_back(kind_of(request));
  }
  [[nodiscard]] bool has(const Fleet::Request& request) const {
    return is_plain(request) &&
           std::find(kinds_.begin(), kinds_.end(), kind_of(request)) != kinds_.end();
  }

 private:
  using Kind = std::pair<std::string_view, bool>;
  static bool is_plain(const Fleet::Request& request) {
    return request.tried.empty() && request.excluded.empty();
  }
  [[nodiscard]] Kind kind_of(const Fleet::Request& request) const {
    return {request.model, fleet_.may_wait(Role::kDecode, request)};
  }
  const Fleet& fleet_;
  std::vector<Kind> kinds_;
};

}  // namespace

WaitingLine::Flow* WaitingLine::find(std::uint64_t key) {
  const auto found =
      std::find_if(flows_.begin(), flows_.end(), [&](const Flow& each) { return each.key == key; });
  return found == flows_.end() ? nullptr : &*found;
}

bool WaitingLine::join(Place& place, std::size_t most, TimePoint now) {
  if (size_ >= most) {
    const auto longest = std::max_element(
        flows_.begin(), flows_.end(),
        [](const Flow& a, const Flow& b) { return a.places.size() < b.places.size(); });
    const Flow* const own = find(place.key);
    const std::size_t count = own == nullptr ? 0 : own->places.size();
    if (longest == flows_.end() || count + 1 >= longest->places.size()) return false;
    const auto flow = static_cast<std::size_t>(longest - flows_.begin());
    remove(flow, longest->places.size() - 1).called({nullptr, Fleet::Why::kBusy});
  }
  if (size_ == 0) measured_until_ = now;
  Flow* flow = find(place.key);
  if (flow == nullptr) {
    // Behind the others in this round.
    const auto at =
        flows_.insert(flows_.begin() + static_cast<std::ptrdiff_t>(std::min(next_, flows_.size())),
                      Flow{.key = place.key});
    ++next_;
    flow = &*at;
  }
  flow->places.push_back(&place);
  flow->tokens += place.tokens;
  ++size_;
  return true;
}

void WaitingLine::leave(Place& place) {
  for (std::size_t i = 0; i < flows_.size(); ++i) {
    if (flows_[i].key != place.key) continue;
    const auto& places = flows_[i].places;
    const auto at = std::find(places.begin(), places.end(), &place);
    if (at != places.end()) remove(i, static_cast<std::size_t>(at - places.begin()));
    return;
  }
}

WaitingLine::Place& WaitingLine::remove(std::size_t flow, std::size_t place) {
  Flow& from = flows_[flow];
  Place* const removed = from.places[place];
  from.places.erase(from.places.begin() + static_cast<std::ptrdiff_t>(place));
  from.tokens -= removed->tokens;
  --size_;
  if (from.places.empty()) {
    flows_.erase(flows_.begin() + static_cast<std::ptrdiff_t>(flow));
    if (flow < next_) --next_;
  }
  return *removed;
}

std::optional<WaitingLine::Pick> WaitingLine::pick(const Fits& fits) {
  candidates_.clear();
  std::optional<Pick> best;
  for (std::size_t turn = 0; turn < flows_.size(); ++turn) {
    const std::size_t at = (next_ + turn) % flows_.size();
    const Flow& flow = flows_[at];
    const auto first = std::find_if(flow.places.begin(), flow.places.end(),
                                    [&](const Place* each) { return fits(*each); });
    if (first == flow.places.end()) continue;
    candidates_.push_back(at);
    const std::uint64_t tokens = (*first)->tokens;
    const std::uint64_t rounds = tokens > flow.deficit ? tokens - flow.deficit : 0;
    if (!best || rounds < best->rounds) {
      best = Pick{at, static_cast<std::size_t>(first - flow.places.begin()), rounds};
    }
  }
  return best;
}

WaitingLine::Place& WaitingLine::take(const Pick& pick) {
  for (const std::size_t each : candidates_) flows_[each].deficit += pick.rounds;
  Flow& flow = flows_[pick.flow];
  flow.deficit -= flow.places[pick.place]->tokens;
  next_ = pick.flow + 1;
  return remove(pick.flow, pick.place);
}

void WaitingLine::serve(Fleet& fleet, const std::shared_ptr<Engine>& engine, TimePoint now) {
  if (size_ == 0) return;
  Refused refused(fleet);
  const auto found = pick([&](const Place& place) {
    if (refused.has(place.request)) return false;
    if (fleet.has_room_for(*engine, place.request)) return true;
    refused.add(place.request);
    return false;
  });
  if (!found) return;
  // Mostly this engine, since the others have no room; the policy notes its choice.
  const Fleet::Request& request = flows_[found->flow].places[found->place]->request;
  const Fleet::Choice choice = fleet.choose(Role::kDecode, request);
  if (!choice.engine) return;
  Place& place = take(*found);
  served(place.tokens, now);
  place.called(choice);
}

void WaitingLine::serve_all(Fleet& fleet, TimePoint now) {
  if (size_ == 0) return;
  ++pass_;
  Refused refused(fleet);
  const Fits is_open = [&](const Place& place) {
    return place.pass != pass_ && !refused.has(place.request);
  };
  while (const auto found = pick(is_open)) {
    Place& candidate = *flows_[found->flow].places[found->place];
    const Fleet::Choice choice = fleet.choose(Role::kDecode, candidate.request);
    if (choice.why == Fleet::Why::kBusy) {
      candidate.pass = pass_;
      refused.add(candidate.request);
      continue;
    }
    Place& place = take(*found);
    if (choice.engine) served(place.tokens, now);
    place.called(choice);
  }
}

void WaitingLine::served(std::uint64_t tokens, TimePoint now) {
  const double passed = std::chrono::duration<double>(now - measured_until_).count();
  const double kept = std::exp(-passed / kMemorySeconds);
  served_tokens_ = served_tokens_ * kept + static_cast<double>(tokens);
  served_seconds_ = served_seconds_ * kept + passed;
  measured_until_ = now;
}

std::uint64_t WaitingLine::tokens() const noexcept {
  std::uint64_t sum = 0;
  for (const Flow& flow : flows_) sum += flow.tokens;
  return sum;
}

std::uint64_t WaitingLine::tokens_before(std::uint64_t key, std::uint64_t tokens) const {
  std::uint64_t own = 0;
  for (const Flow& flow : flows_) own += flow.key == key ? flow.tokens : 0;
  // Meanwhile each of the others has as much served, or all that it waits for.
  std::uint64_t before = own;
  for (const Flow& flow : flows_) {
    if (flow.key != key) before += std::min(flow.tokens, own + tokens);
  }
  return before;
}

std::optional<Duration> WaitingLine::predicted_wait(std::uint64_t key, std::uint64_t tokens,
                                                    TimePoint now) const {
  if (served_tokens_ <= 0) return std::nullopt;
  const Duration waited = size_ == 0 ? Duration::zero() : now - measured_until_;
  const double seconds = served_seconds_ + std::chrono::duration<double>(waited).count();
  if (seconds <= 0) return std::nullopt;
  const double rate = served_tokens_ / seconds;
  const double wait = static_cast<double>(tokens_before(key, tokens) + tokens) / rate;
  constexpr double kMost = 3600;
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(std::min(wait, kMost)));
}

}  // namespace pegaflow::router
