#include "client/breaker.h"

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST_SUITE("Breaker") {
  TEST_CASE("three missed deadlines within the window open it, once") {
    ManualClock clock;
    Breaker breaker(clock, 3, seconds(1));

    CHECK_FALSE(breaker.on_deadline_missed());
    clock.advance(milliseconds(400));
    CHECK_FALSE(breaker.on_deadline_missed());
    CHECK_FALSE(breaker.is_open());
    clock.advance(milliseconds(600));
    CHECK(breaker.on_deadline_missed());

    CHECK(breaker.is_open());
    CHECK_FALSE(breaker.on_deadline_missed());  // It is open already.
  }

  TEST_CASE("missed deadlines that lie further apart do not open it") {
    ManualClock clock;
    Breaker breaker(clock, 3, seconds(1));
    for (int i = 0; i < 100; ++i) {
      CHECK_FALSE(breaker.on_deadline_missed());
      clock.advance(milliseconds(501));
    }
    CHECK_FALSE(breaker.is_open());
  }

  TEST_CASE("closing forgets what was missed") {
    ManualClock clock;
    Breaker breaker(clock, 2, seconds(1));
    breaker.on_deadline_missed();
    CHECK(breaker.on_deadline_missed());

    breaker.close();

    CHECK_FALSE(breaker.is_open());
    CHECK_FALSE(breaker.on_deadline_missed());
    CHECK(breaker.on_deadline_missed());
  }

  TEST_CASE("a breaker of one opens at once") {
    ManualClock clock;
    Breaker breaker(clock, 1, seconds(1));
    CHECK(breaker.on_deadline_missed());
  }
}

}  // namespace
}  // namespace pegaflow
