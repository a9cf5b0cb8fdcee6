#include "client/load_pace.h"

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

using std::chrono::milliseconds;

constexpr TimePoint kBegin{std::chrono::seconds(100)};

/// 100 blocks, from 10 to 110 ms: a millisecond each. Computing takes two.
LoadPace promised() {
  return {{.first = milliseconds(10),
           .last = milliseconds(110),
           .compute_delay = {},
           .compute_block = milliseconds(2)},
          kBegin};
}

TEST_SUITE("LoadPace") {
  TEST_CASE("a load without a promise, or of blocks whose computing is not known, is never late") {
    const TimePoint later = kBegin + std::chrono::hours(1);
    CHECK_FALSE(LoadPace().is_stuck(later));
    const LoadPace here({.compute_block = milliseconds(1)}, kBegin);
    CHECK_FALSE(here.is_stuck(later));
    CHECK(here.computing(7) == milliseconds(7));
    const LoadPace unknown({.first = milliseconds(1), .last = milliseconds(2)}, kBegin);
    CHECK_FALSE(unknown.is_stuck(later));
    CHECK_FALSE(unknown.computing(7));
  }

  TEST_CASE("a source that sends nothing is stuck 8 ms after the first block was promised") {
    const LoadPace pace = promised();
    CHECK_FALSE(pace.is_stuck(kBegin + milliseconds(18)));
    CHECK(pace.is_stuck(kBegin + milliseconds(19)));
  }

  TEST_CASE(
      "a source that sends nothing is asked for until its blocks are due, not again and again") {
    // The promise of a source that is far behind: a second until its first block.
    const LoadPace pace({.first = milliseconds(1000),
                         .last = milliseconds(1100),
                         .compute_delay = {},
                         .compute_block = milliseconds(100)},
                        kBegin);
    int questions = 0;
    TimePoint now = kBegin;
    while (!pace.is_stuck(now)) {
      now += pace.patience(now);
      ++questions;
    }
    CHECK(questions == 2);  // The second, since stuck is what comes later than it is due.
    CHECK(now == kBegin + milliseconds(1000) + LoadPace::kSlack + LoadPace::kInterval);
  }

  TEST_CASE("a source that stops is stuck half an interval and 8 ms after the next was due") {
    LoadPace pace = promised();
    pace.arrived(8, 100, kBegin + milliseconds(10));
    pace.arrived(8, 100, kBegin + milliseconds(18));
    CHECK_FALSE(pace.is_stuck(kBegin + milliseconds(18 + 12 + 8)));
    CHECK(pace.is_stuck(kBegin + milliseconds(18 + 12 + 9)));
  }

  TEST_CASE("a load that arrives as promised is not slow") {
    LoadPace pace = promised();
    for (int piece = 1; piece <= 12; ++piece) {
      const TimePoint now = kBegin + milliseconds(2 + 8 * piece);
      pace.arrived(8, 100, now);
      CHECK_FALSE(pace.is_slow(100 - 8 * static_cast<std::size_t>(piece), now));
    }
  }

  TEST_CASE("a load is slow once its rest is computed more than 8 ms sooner than it arrives") {
    LoadPace pace = promised();
    pace.arrived(8, 100, kBegin + milliseconds(10));
    // 3 ms a block, and 84 left: 252 ms, where computing takes 168.
    pace.arrived(8, 100, kBegin + milliseconds(34));
    CHECK(pace.is_slow(84, kBegin + milliseconds(34)));
    // At the end it does not matter any more.
    CHECK_FALSE(pace.is_slow(8, kBegin + milliseconds(34)));
  }

  TEST_CASE("what the engine computes first counts as long as it takes") {
    LoadPace pace({.first = milliseconds(10),
                   .last = milliseconds(110),
                   .compute_delay = milliseconds(200),
                   .compute_block = milliseconds(2)},
                  kBegin);
    pace.arrived(8, 100, kBegin + milliseconds(10));
    pace.arrived(8, 100, kBegin + milliseconds(34));
    CHECK_FALSE(pace.is_slow(84, kBegin + milliseconds(34)));
    pace.arrived(8, 100, kBegin + milliseconds(58));
    CHECK(pace.is_slow(76, kBegin + milliseconds(190)));
  }
}

}  // namespace
}  // namespace pegaflow
