#include "perf/replay/pauses.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::perf {
namespace {

constexpr std::uint32_t kShort = 50;
constexpr std::uint32_t kLong = 2000;

/// 16 conversations of 10 blocks. After a short answer the next request follows in 5 s, after a
/// long one in an hour; every fourth answer is long.
RequestTrace made_trace(std::size_t rounds) {
  struct Next {
    double at = 0;
    std::size_t turn = 0;
  };
  std::vector<Next> users(16);
  for (std::size_t i = 0; i < users.size(); ++i) users[i] = {0.25 * static_cast<double>(i), i % 4};
  RequestTrace trace{.name = "made", .requests = {}};
  for (std::size_t n = 0; n < rounds * users.size(); ++n) {
    std::size_t who = 0;
    for (std::size_t i = 0; i < users.size(); ++i) {
      if (users[i].at < users[who].at) who = i;
    }
    const bool is_long = users[who].turn++ % 4 == 3;
    Prompt prompt;
    for (std::uint64_t block = 0; block < 10; ++block) prompt.push_back(who * 100 + block);
    trace.requests.push_back(prompt);
    trace.arrivals.push_back({.milliseconds = users[who].at * 1000,
                              .input_tokens = 5120,
                              .output_tokens = is_long ? kLong : kShort});
    users[who].at += is_long ? 3600 : 5;
  }
  return trace;
}

RequestTrace beginning_of(RequestTrace trace, std::size_t requests) {
  trace.requests.resize(requests);
  trace.arrivals.resize(requests);
  return trace;
}

/// The trace with another future from request `from` on: its conversations return in another order.
RequestTrace with_another_future(RequestTrace trace, std::size_t from) {
  for (std::size_t i = from, j = trace.requests.size() - 1; i < j; ++i, --j) {
    std::swap(trace.requests[i], trace.requests[j]);
    std::swap(trace.arrivals[i].output_tokens, trace.arrivals[j].output_tokens);
  }
  return trace;
}

/// Whether the first `requests` requests have the same victims in both traces.
bool are_equal_until(const RequestTrace& a, const RequestTrace& b, std::size_t requests,
                     KeepOrder order) {
  const auto first = replay_pauses(a, 60, order).victims;
  const auto second = replay_pauses(b, 60, order).victims;
  return std::equal(first.begin(), first.begin() + static_cast<std::ptrdiff_t>(requests),
                    second.begin());
}

TEST_SUITE("pauses") {
  TEST_CASE("hints know nothing of the future, and the check would see it if they did") {
    const RequestTrace trace = made_trace(40);
    bool min_differs = false;
    for (const std::size_t cut : {100, 250, 400}) {
      CAPTURE(cut);
      const RequestTrace other = with_another_future(trace, cut);
      for (const KeepOrder order : {KeepOrder::kHints, KeepOrder::kLru}) {
        CHECK(are_equal_until(trace, beginning_of(trace, cut), cut, order));
        CHECK(are_equal_until(trace, other, cut, order));
      }
      min_differs = min_differs || !are_equal_until(trace, other, cut, KeepOrder::kMin);
    }
    CHECK(min_differs);
  }

  TEST_CASE("with hints conversations that return soon are kept, and more is found than by LRU") {
    const RequestTrace trace = made_trace(60);
    const double lru = replay_pauses(trace, 60, KeepOrder::kLru).hit_rate();
    const double hints = replay_pauses(trace, 60, KeepOrder::kHints).hit_rate();
    const double min = replay_pauses(trace, 60, KeepOrder::kMin).hit_rate();
    CAPTURE(lru);
    CAPTURE(hints);
    CAPTURE(min);
    CHECK(hints >= lru + 0.5 * (min - lru));
    CHECK(hints <= min);
  }

  TEST_CASE("a pool for everything finds the same by any order") {
    const RequestTrace trace = made_trace(20);
    const auto all = replay_pauses(trace, 160, KeepOrder::kMin);
    CHECK(all.found == trace.requests.size() * 10 - 160);
    CHECK(replay_pauses(trace, 160, KeepOrder::kHints).found == all.found);
    CHECK(replay_pauses(trace, 160, KeepOrder::kLru).found == all.found);
  }

  TEST_CASE(
      "a conversation is worth more when its kind returns soon, and less the longer it waits") {
    PauseHints hints;
    double now = 0;
    for (int i = 0; i < 50; ++i) {
      hints.paused(1, now, kShort);
      hints.resumed(1, now + 5);
      hints.paused(2, now + 5, kLong);
      hints.resumed(2, now + 905);
      now += 905;
    }
    hints.paused(1, now, kShort);
    hints.paused(2, now, kLong);
    CHECK(hints.worth(1, now) > 1.5 * hints.worth(2, now));
    CHECK(hints.worth(1, now + 100) < hints.worth(1, now) / 3);
    CHECK(hints.worth(3, now + 100) == 0);
    hints.resumed(1, now + 100);
    CHECK(hints.worth(1, now + 100) == 0);
  }
}

}  // namespace
}  // namespace pegaflow::perf
