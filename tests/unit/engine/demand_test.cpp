#include "engine/demand/demand.h"

#include <cmath>
#include <set>

#include <doctest/doctest.h>

#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using std::chrono::hours;
using std::chrono::minutes;
using std::chrono::seconds;
using testing::keys;

constexpr SpaceId kSpace{1};
constexpr std::uint64_t kPage = 4096;

struct Watched {
  explicit Watched(std::vector<seconds> windows = {minutes(5), hours(1), hours(24)}) {
    auto made = Demand::create(std::move(windows), clock);
    REQUIRE(made);
    demand = std::move(*made);
  }
  Demand::Window window(std::size_t i) { return demand->windows()[i]; }

  ManualClock clock;
  std::unique_ptr<Demand> demand;
};

bool is_about(double estimate, double exact) {
  return std::abs(estimate - exact) <= 0.08 * exact;  // Five standard errors.
}

TEST_SUITE("Demand") {
  TEST_CASE("windows have 1 minute to 7 days, and are different") {
    const auto code = [](std::vector<seconds> windows) {
      return Demand::check(std::move(windows)).error().code;
    };
    CHECK(code({}) == Errc::kInvalidArgument);
    CHECK(code({seconds(59)}) == Errc::kInvalidArgument);
    CHECK(code({hours(7 * 24) + seconds(1)}) == Errc::kInvalidArgument);
    CHECK(code({minutes(5), hours(1), minutes(5)}) == Errc::kInvalidArgument);
    CHECK(code(std::vector<seconds>(9, hours(1))) == Errc::kInvalidArgument);
    CHECK(Demand::check({hours(1), minutes(1), hours(7 * 24)}));
    ManualClock clock;
    CHECK(Demand::create({seconds(1)}, clock).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("before the first lookup all is 0") {
    Watched f;
    for (const Demand::Window& window : f.demand->windows()) {
      CHECK(window.requested == 0);
      CHECK(window.hit_rate() == 0);
      CHECK(window.ceiling() == 0);
      CHECK(window.distinct == 0);
      CHECK(window.bytes == 0);
    }
  }

  TEST_CASE("windows come shortest first") {
    Watched f({hours(1), minutes(1)});
    CHECK(f.window(0).length == minutes(1));
    CHECK(f.window(1).length == hours(1));
  }

  TEST_CASE("blocks requested twice are found by a pool that loses nothing") {
    Watched f;
    const auto prompt = keys(0, 5'000);

    f.demand->requested(kSpace, prompt, 0, kPage);
    CHECK(f.window(0).ceiling() < 0.1);
    f.demand->requested(kSpace, prompt, 0, kPage);  // Evicted meanwhile, for example.

    const Demand::Window window = f.window(0);
    CHECK(window.requested == 10'000);
    CHECK(window.hit_rate() == 0);
    CHECK(is_about(window.fresh, 5'000));
    CHECK(is_about(window.ceiling(), 0.5));
    CHECK(is_about(window.distinct, 5'000));
    CHECK(is_about(window.bytes, 5'000.0 * kPage));
  }

  TEST_CASE("blocks saved before they are requested are not new") {
    Watched f;
    f.demand->saved(kSpace, keys(0, 3'000), kPage);

    f.demand->requested(kSpace, keys(0, 3'000), 0, kPage);

    CHECK(f.window(0).fresh == 0);
    CHECK(f.window(0).ceiling() == 1);
    CHECK(is_about(f.window(0).distinct, 3'000));
  }

  TEST_CASE("present blocks are never new, however old they are") {
    Watched f;
    const auto prompt = keys(0, 1'000);

    f.demand->requested(kSpace, prompt, 600, kPage);

    const Demand::Window window = f.window(0);
    CHECK(window.hit_rate() == 0.6);
    CHECK(window.ceiling() >= 0.6);
    CHECK(window.fresh > 0);
    CHECK(window.fresh <= 400 * 1.2);
  }

  TEST_CASE("found blocks belong to the working set, and are known when they are gone") {
    Watched f;
    const auto prompt = keys(0, 2'000);

    f.demand->requested(kSpace, prompt, 2'000, kPage);
    CHECK(is_about(f.window(0).distinct, 2'000));
    f.demand->requested(kSpace, prompt, 0, kPage);

    CHECK(f.window(0).fresh == 0);
    CHECK(f.window(0).ceiling() == 1);
  }

  TEST_CASE("a window covers its last 60 whole parts, for known blocks and for requests alike") {
    for (const int later_s : {60, 61}) {
      CAPTURE(later_s);
      Watched f({minutes(1)});
      const auto prompt = keys(0, 1'000);
      f.demand->requested(kSpace, prompt, 0, kPage);

      f.clock.advance(seconds(later_s));
      f.demand->requested(kSpace, prompt, 0, kPage);

      const Demand::Window window = f.window(0);
      CHECK(window.requested == (later_s == 60 ? 2'000 : 1'000));
      CHECK(is_about(window.fresh, 1'000));  // The first time, or after it was forgotten.
    }
  }

  TEST_CASE("blocks of two namespace generations are different") {
    Watched f;
    f.demand->requested(SpaceId{1}, keys(0, 2'000), 0, kPage);
    f.demand->requested(SpaceId{2}, keys(0, 2'000), 0, kPage);
    CHECK(is_about(f.window(0).distinct, 4'000));
    CHECK(is_about(f.window(0).fresh, 4'000));
  }

  TEST_CASE("engines with pages of two sizes count with the mean size") {
    Watched f;
    f.demand->requested(SpaceId{1}, keys(0, 2'000), 0, 4096);
    f.demand->requested(SpaceId{2}, keys(0, 2'000), 0, 8192);
    CHECK(is_about(f.window(0).bytes, 2'000.0 * (4096 + 8192)));
  }

  TEST_CASE("a window forgets blocks from before it, a longer one does not") {
    Watched f;
    const auto prompt = keys(0, 4'000);
    f.demand->requested(kSpace, prompt, 0, kPage);

    f.clock.advance(minutes(6));
    f.demand->requested(kSpace, prompt, 0, kPage);

    CHECK(f.window(0).requested == 4'000);
    CHECK(is_about(f.window(0).fresh, 4'000));  // The pool would have had to keep them for 6 min.
    CHECK(f.window(1).requested == 8'000);
    CHECK(is_about(f.window(1).fresh, 4'000));
    CHECK(is_about(f.window(1).ceiling(), 0.5));

    f.clock.advance(hours(2));
    CHECK(f.window(1).requested == 0);
    CHECK(f.window(1).distinct == 0);
    CHECK(f.window(2).requested == 8'000);
  }

  TEST_CASE("it still counts after weeks without a lookup") {
    Watched f;
    f.demand->requested(kSpace, keys(0, 1'000), 0, kPage);
    f.clock.advance(hours(24 * 40));
    CHECK(f.window(2).requested == 0);
    f.demand->requested(kSpace, keys(0, 1'000), 0, kPage);
    CHECK(f.window(2).requested == 1'000);
    CHECK(is_about(f.window(2).fresh, 1'000));
  }

  TEST_CASE("under steady traffic each window counts what is new to it") {
    // 100 blocks a second for two hours; each is requested again after 10 minutes.
    Watched f({minutes(5), hours(1)});
    for (std::uint64_t second = 0; second < 7200; ++second) {
      f.demand->requested(kSpace, keys(second * 100, 100), 0, kPage);
      if (second >= 600) f.demand->requested(kSpace, keys((second - 600) * 100, 100), 0, kPage);
      f.clock.advance(seconds(1));
    }

    // Up to a part more than a window: 305 s and 3660 s.
    CHECK(f.window(0).requested >= 2 * 300 * 100);
    CHECK(f.window(0).requested <= 2 * 305 * 100);
    CHECK(f.window(0).ceiling() < 0.1);
    CHECK(f.window(1).requested >= 2 * 3600 * 100);
    CHECK(f.window(1).requested <= 2 * 3660 * 100);
    CHECK(is_about(f.window(1).ceiling(), 0.5));
    CHECK(is_about(f.window(1).distinct, 3660 * 100 + 600 * 100));
  }

  TEST_CASE("its memory does not grow") {
    Watched f;
    const std::uint64_t before = f.demand->memory_bytes();
    for (std::uint64_t i = 0; i < 100; ++i) {
      f.demand->requested(kSpace, keys(i * 8192, 8192), 0, kPage);
      f.clock.advance(minutes(7));
    }
    CHECK(f.demand->memory_bytes() == before);
    CHECK(before < std::uint64_t{1} << 20);
  }
}

}  // namespace
}  // namespace pegaflow::engine
