#include "router/http/deadlines.h"

#include <memory>
#include <random>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// A timer by hand.
struct Timer {
  ManualClock clock;
  TimePoint wakes_at = TimePoint::max();
  int wakes = 0;
  Deadlines deadlines{clock, [this](TimePoint when) { wakes_at = when; }};

  /// Advances the time, with each run() that was requested.
  void pass(Duration time) {
    const TimePoint end = clock.now() + time;
    while (wakes_at <= end) {
      clock.advance(wakes_at - clock.now());
      wakes_at = TimePoint::max();
      ++wakes;
      deadlines.run();
    }
    clock.advance(end - clock.now());
  }
};

TEST_SUITE("Deadlines") {
  TEST_CASE("each acts once, never early, and late by less than a grain") {
    Timer timer;
    std::vector<int> acted;
    Deadline later(timer.deadlines, [&] { acted.push_back(2); });
    Deadline sooner(timer.deadlines, [&] { acted.push_back(1); });
    later.set(milliseconds(105));
    sooner.set(milliseconds(30));

    timer.pass(milliseconds(29));
    CHECK(acted.empty());
    timer.pass(Deadlines::kGrain);
    CHECK(acted == std::vector{1});
    CHECK(sooner.is_over());
    CHECK_FALSE(later.is_over());
    timer.pass(seconds(1));
    CHECK(acted == std::vector{1, 2});
    CHECK(timer.wakes_at == TimePoint::max());
  }

  TEST_CASE("a deadline that every piece of a stream postpones wakes once per period") {
    Timer timer;
    bool acted = false;
    Deadline deadline(timer.deadlines, [&] { acted = true; });
    for (int piece = 0; piece < 10'000; ++piece) {
      deadline.set(seconds(10));
      timer.pass(milliseconds(10));
    }
    CHECK_FALSE(acted);
    CHECK(timer.wakes <= 11);  // 100 s.

    timer.pass(seconds(11));
    CHECK(acted);
  }

  TEST_CASE("an earlier time replaces a later one, and a cleared deadline never acts") {
    Timer timer;
    int acted = 0;
    Deadline deadline(timer.deadlines, [&] { ++acted; });
    deadline.set(seconds(60));
    deadline.set(seconds(1));
    timer.pass(seconds(2));
    CHECK(acted == 1);

    deadline.set(seconds(1));
    deadline.clear();
    timer.pass(seconds(100));
    CHECK(acted == 1);
    CHECK(timer.wakes == 2);
    CHECK(timer.wakes_at == TimePoint::max());
  }

  TEST_CASE("10,000 deadlines of a minute cause no earlier wake-up") {
    Timer timer;
    std::vector<std::unique_ptr<Deadline>> idle;
    int acted = 0;
    for (int i = 0; i < 10'000; ++i) {
      idle.push_back(std::make_unique<Deadline>(timer.deadlines, [&] { ++acted; }));
      idle.back()->set(seconds(60));
    }
    timer.pass(seconds(59));
    CHECK(timer.wakes == 0);
    timer.pass(seconds(2));
    CHECK(acted == 10'000);
    CHECK(timer.wakes == 1);
  }

  TEST_CASE("without any deadline the timer is canceled") {
    Timer timer;
    {
      const auto first = std::make_unique<Deadline>(timer.deadlines, [] {});
      Deadline second(timer.deadlines, [] {});
      first->set(seconds(1));
      second.set(seconds(2));
    }
    CHECK(timer.wakes_at == TimePoint::max());
  }

  TEST_CASE("an action may set its own and other deadlines") {
    Timer timer;
    int acted = 0;
    Deadline other(timer.deadlines, [&] { ++acted; });
    Deadline* self = nullptr;
    Deadline deadline(timer.deadlines, [&] {
      if (++acted < 3) self->set(seconds(1));
      other.set(milliseconds(500));
    });
    self = &deadline;
    deadline.set(seconds(1));
    timer.pass(seconds(10));
    CHECK(acted == 4);
  }

  TEST_CASE("random operations: each deadline acts in the grain in which it is due") {
    std::mt19937 random(20);  // The same in every run.
    Timer timer;
    struct Each {
      std::unique_ptr<Deadline> deadline;
      TimePoint due = TimePoint::max();
    };
    std::vector<Each> all(200);
    const auto renew = [&](Each& each) {
      each.due = TimePoint::max();
      each.deadline = std::make_unique<Deadline>(timer.deadlines, [&timer, &each] {
        CHECK(each.due <= timer.clock.now());
        CHECK(timer.clock.now() < each.due + Deadlines::kGrain);
        each.due = TimePoint::max();
      });
    };
    for (Each& each : all) renew(each);
    for (int step = 0; step < 20'000; ++step) {
      Each& each = all[random() % all.size()];
      switch (random() % 8) {
        case 0:
          each.deadline->clear();
          each.due = TimePoint::max();
          break;
        case 1:
          renew(each);
          break;
        default: {
          const milliseconds time(random() % 3000);
          each.deadline->set(time);
          each.due = timer.clock.now() + time;
        }
      }
      timer.pass(milliseconds(random() % 5));
      for (const Each& one : all) {
        REQUIRE((one.due == TimePoint::max() || timer.clock.now() < one.due + Deadlines::kGrain));
      }
    }
    all.clear();
    CHECK(timer.wakes_at == TimePoint::max());
  }
}

}  // namespace
}  // namespace pegaflow::router
