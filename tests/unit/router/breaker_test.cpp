#include "router/routing/breaker.h"

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

using std::chrono::seconds;

TEST_SUITE("Breaker") {
  TEST_CASE("it opens after failures in a row, and one request tries again") {
    ManualClock clock;
    Breaker breaker({.failures = 2, .open_time = seconds(1), .open_time_limit = seconds(3)});
    breaker.failed(clock.now());
    breaker.succeeded();
    breaker.failed(clock.now());
    CHECK(breaker.allows(clock.now()));
    breaker.failed(clock.now());
    CHECK_FALSE(breaker.allows(clock.now()));

    clock.advance(seconds(1));
    CHECK(breaker.state(clock.now()) == Breaker::State::kHalfOpen);
    CHECK(breaker.allows(clock.now()));
    breaker.started(clock.now());
    CHECK_FALSE(breaker.allows(clock.now()));  // One trial at a time.
    breaker.succeeded();
    CHECK(breaker.state(clock.now()) == Breaker::State::kClosed);
    CHECK(breaker.opened() == 1);
  }

  TEST_CASE("each relapse doubles the time, up to a limit") {
    ManualClock clock;
    Breaker breaker({.failures = 1, .open_time = seconds(1), .open_time_limit = seconds(3)});
    for (const int expected : {1, 2, 3, 3}) {
      breaker.started(clock.now());
      breaker.failed(clock.now());
      clock.advance(seconds(expected) - std::chrono::milliseconds(1));
      CHECK(breaker.state(clock.now()) == Breaker::State::kOpen);
      clock.advance(std::chrono::milliseconds(1));
      CHECK(breaker.state(clock.now()) == Breaker::State::kHalfOpen);
    }
  }

  TEST_CASE("a request sent before it opened does not keep it open") {
    ManualClock clock;
    Breaker breaker({.failures = 1, .open_time = seconds(1), .open_time_limit = seconds(9)});
    for (int i = 0; i < 5; ++i) breaker.started(clock.now());
    for (int i = 0; i < 5; ++i) breaker.failed(clock.now());
    CHECK(breaker.opened() == 1);
    clock.advance(seconds(1));
    CHECK(breaker.allows(clock.now()));
  }

  TEST_CASE("an abandoned trial allows the next one") {
    ManualClock clock;
    Breaker breaker({.failures = 1, .open_time = seconds(1), .open_time_limit = seconds(1)});
    breaker.failed(clock.now());
    clock.advance(seconds(1));
    breaker.started(clock.now());
    breaker.withdrawn();
    CHECK(breaker.allows(clock.now()));
  }
}

}  // namespace
}  // namespace pegaflow::router
