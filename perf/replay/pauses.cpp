#include "perf/replay/pauses.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/assert.h"

namespace pegaflow::perf {

namespace {

/// Ends of the steps, in seconds: tools return after seconds, people after minutes or hours.
constexpr std::array<double, 31> kEnds = {2,   3,   4,   5,   6,   7,   8,    9,    10,  12, 14,
                                          16,  18,  20,  25,  30,  35,  40,   50,   60,  80, 100,
                                          130, 180, 250, 350, 500, 800, 1500, 3000, 1e12};
/// A longer wait for a return counts as this one.
constexpr double kMostSeconds = 6000;
/// Seconds for which blocks are kept whatever happens: without them a conversation that returns at
/// once is worth any others.
constexpr double kLeastSeconds = 0.5;
/// Seconds of a step that the rate of all pauses counts for, where few of a kind were seen.
constexpr double kPrior = 200;
constexpr double kLongPause = 60;

std::size_t step_of(double length) {
  const auto at = std::lower_bound(kEnds.begin(), kEnds.end(), length);
  return static_cast<std::size_t>(at - kEnds.begin());
}

std::size_t answer_class(std::uint32_t tokens) {
  constexpr std::array<std::uint32_t, 4> kLimits = {130, 200, 350, 850};
  return static_cast<std::size_t>(std::upper_bound(kLimits.begin(), kLimits.end(), tokens) -
                                  kLimits.begin());
}

}  // namespace

void PauseHints::check_order(double now) const {
  PEGA_ASSERT(now >= last_, "an event at {} s after one at {} s", now, last_);
}

void PauseHints::add(Seen& seen, double length) {
  const std::size_t last = step_of(length);
  double begin = 0;
  for (std::size_t step = 0; step <= last; ++step) {
    const double end = std::min(kEnds[step], length);
    seen.seconds[step] += end - begin;
    begin = end;
  }
  seen.returns[last] += 1;
}

void PauseHints::resumed(std::uint64_t conversation, double now) {
  check_order(now);
  last_ = now;
  const auto found = pauses_.find(conversation);
  if (found == pauses_.end() || !found->second.is_open) return;
  Pause& pause = found->second;
  const double length = now - pause.since;
  add(by_kind_[pause.kind], length);
  add(all_, length);
  pause.is_open = false;
  pause.former = length < kLongPause ? 0 : 1;
}

void PauseHints::paused(std::uint64_t conversation, double now, std::uint32_t answer_tokens) {
  check_order(now);
  last_ = now;
  const auto [at, is_new] = pauses_.try_emplace(conversation);
  Pause& pause = at->second;
  if (is_new) pause.former = 2;
  pause.since = now;
  pause.is_open = true;
  pause.kind = answer_class(answer_tokens) * 3 + pause.former;
}

double PauseHints::worth(std::uint64_t conversation, double now) const {
  check_order(now);
  const auto found = pauses_.find(conversation);
  if (found == pauses_.end() || !found->second.is_open) return 0;
  const Seen& own = by_kind_[found->second.kind];
  double at = now - found->second.since;
  const double end = at + kMostSeconds;
  double best = 0;
  double stays = 1;    // The probability that it has not returned by `at`.
  double returns = 0;  // And that it has.
  double kept = kLeastSeconds;
  // An index of Gittins: the best ratio of returns to time over all times to give up.
  for (std::size_t step = step_of(std::nextafter(at, end)); step < kSteps && at < end; ++step) {
    const double usual = (all_.returns[step] + 0.05) / (all_.seconds[step] + 50);
    const double rate = (own.returns[step] + usual * kPrior) / (own.seconds[step] + kPrior);
    const double next = std::min(kEnds[step], end);
    const double left = stays * std::exp(-rate * (next - at));
    returns += stays - left;
    kept += (stays - left) / rate;
    best = std::max(best, returns / kept);
    stays = left;
    at = next;
  }
  return best;
}

namespace {

/// The blocks of one conversation in the simulated pool.
struct Resident {
  std::size_t request = 0;  ///< Its last one.
  std::size_t blocks = 0;   ///< From the start of that prompt.
};

std::vector<double> next_uses(const RequestTrace& trace) {
  std::vector<double> next(trace.requests.size(), std::numeric_limits<double>::infinity());
  std::unordered_map<std::uint64_t, std::size_t> last;
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const auto [at, is_new] = last.try_emplace(trace.requests[i].front(), i);
    if (!is_new) next[std::exchange(at->second, i)] = static_cast<double>(i);
  }
  return next;
}

std::size_t common_prefix(const Prompt& a, const Prompt& b) {
  const auto ends = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return static_cast<std::size_t>(ends.first - a.begin());
}

}  // namespace

PausesResult replay_pauses(const RequestTrace& trace, std::uint64_t blocks, KeepOrder order) {
  PEGA_ASSERT(trace.arrivals.size() == trace.requests.size(), "{} arrivals of {} requests",
              trace.arrivals.size(), trace.requests.size());
  const std::vector<double> next =
      order == KeepOrder::kMin ? next_uses(trace) : std::vector<double>();
  PauseHints hints;
  PausesResult result;
  std::unordered_map<std::uint64_t, Resident> pool;
  std::uint64_t used = 0;
  std::vector<std::pair<double, std::uint64_t>> ranked;  // The least worth first.
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const Prompt& prompt = trace.requests[i];
    const double now = trace.arrivals[i].milliseconds / 1000;
    hints.resumed(prompt.front(), now);
    Resident& own = pool[prompt.front()];
    const std::size_t found =
        std::min(own.blocks, common_prefix(trace.requests[own.request], prompt));
    result.asked += prompt.size();
    result.found += found;
    std::vector<std::uint64_t>& victims = result.victims.emplace_back();
    used += prompt.size() - own.blocks;
    own = {i, prompt.size()};
    hints.paused(prompt.front(), now, trace.arrivals[i].output_tokens);
    if (used <= blocks) continue;
    ranked.clear();
    for (const auto& [conversation, resident] : pool) {
      const double worth = order == KeepOrder::kLru   ? static_cast<double>(resident.request)
                           : order == KeepOrder::kMin ? -next[resident.request]
                                                      : hints.worth(conversation, now);
      ranked.emplace_back(worth, conversation);
    }
    std::sort(ranked.begin(), ranked.end());
    for (const auto& [worth, conversation] : ranked) {
      Resident& victim = pool[conversation];
      const std::uint64_t taken = std::min<std::uint64_t>(victim.blocks, used - blocks);
      victim.blocks -= taken;
      victims.push_back(conversation);
      used -= taken;
      if (victim.blocks == 0) pool.erase(conversation);
      if (used <= blocks) break;
    }
  }
  return result;
}

}  // namespace pegaflow::perf
