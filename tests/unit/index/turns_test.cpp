#include "index/placement/turns.h"

#include <vector>

#include <doctest/doctest.h>

#include "index/placement/placement.h"

namespace pegaflow::index {
namespace {

TimePoint at(double seconds) {
  return TimePoint(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
}

PlacementRecord placed_by(RouterId router, std::uint64_t request) {
  return {.router = router,
          .request = request,
          .engine = 0,
          .prompt_tokens = 100,
          .uncached_tokens = 100};
}

/// A moment of the instant `at`, too late for it.
constexpr double kLater = 2 * Turns::kInstant;

TEST_SUITE("Turns") {
  TEST_CASE("a router waits for the routers before it, and for no other one") {
    Turns turns(4);
    CHECK(turns.is_next(100));

    const std::vector<RouterId> before = {1, 2};
    const std::vector<RouterId> after = {3};
    turns.set_others(before, after);
    CHECK_FALSE(turns.is_next(100));

    turns.placed(3, 100);
    turns.placed(1, 100);
    CHECK_FALSE(turns.is_next(100));
    turns.placed(2, 100.0005);
    CHECK(turns.is_next(100));

    turns.set_others({}, {});
    CHECK(turns.is_next(200));
  }

  TEST_CASE("the second request of an instant waits for the first one of all others") {
    Turns turns(4);
    const std::vector<RouterId> before = {1};
    const std::vector<RouterId> after = {2};
    turns.set_others(before, after);
    turns.placed(1, 100);
    REQUIRE(turns.is_next(100));

    turns.placed(0, 100);
    CHECK_FALSE(turns.is_next(100));
    turns.placed(1, 100);
    CHECK_FALSE(turns.is_next(100));
    turns.placed(2, 100);
    CHECK(turns.is_next(100));

    turns.placed(0, 100);
    CHECK_FALSE(turns.is_next(100));
    CHECK_FALSE(turns.is_next(100 + kLater));  // It waits for the router before it only.
    turns.placed(1, 100 + kLater);
    CHECK(turns.is_next(100 + kLater));
  }

  TEST_CASE("the first router waits for no one with its first request") {
    Turns turns(3);
    const std::vector<RouterId> after = {1, 2};
    turns.set_others({}, after);

    CHECK(turns.is_next(100));
    turns.placed(0, 100);
    CHECK_FALSE(turns.is_next(100));
    CHECK(turns.is_next(100 + kLater));
  }

  TEST_CASE("more placements than are counted make no router wait for ever") {
    Turns turns(3);
    const std::vector<RouterId> before = {1};
    const std::vector<RouterId> after = {2};
    turns.set_others(before, after);
    for (std::size_t i = 0; i < 2 * Turns::kCounted; ++i) {
      turns.placed(0, 100);
      turns.placed(1, 100);
      turns.placed(2, 100);
    }

    CHECK(turns.is_next(100));
  }

  TEST_CASE("a placement of an earlier instant ends no wait") {
    Turns turns(4);
    const std::vector<RouterId> before = {1};
    turns.set_others(before, {});

    turns.placed(1, 100);

    CHECK(turns.is_next(100 + Turns::kInstant / 2));
    CHECK_FALSE(turns.is_next(100 + kLater));
  }

  TEST_CASE("a wait ends when the routers that are missing have placed nothing for a while") {
    Turns turns(4);
    const std::vector<RouterId> before = {1, 2};
    const std::vector<RouterId> after = {3};
    turns.set_others(before, after);

    CHECK(turns.end(100, 1) == doctest::Approx(100 + Turns::kFirst + Turns::kFurther));
    turns.placed(1, 100.001);
    CHECK(turns.end(100, 1) == doctest::Approx(100.001 + Turns::kFirst));
    CHECK(turns.end(100, 0.0005) == doctest::Approx(100.0005));
    turns.placed(2, 100.002);
    CHECK(turns.end(100, 1) == 100);
  }

  TEST_CASE("the limit grows with the other routers, up to a share of the prefill") {
    Turns turns(8);
    CHECK(turns.limit(10) == 0);

    const std::vector<RouterId> before = {1, 2};
    const std::vector<RouterId> after = {3};
    turns.set_others(before, after);

    CHECK(turns.limit(10) == doctest::Approx(3 * Turns::kEach));
    CHECK(turns.limit(0.01) == doctest::Approx(Turns::kShare * 0.01));
  }

  TEST_CASE("routers that do not exist are left out") {
    Turns turns(2);
    const std::vector<RouterId> others = {0, 2, 9};
    turns.set_others(others, others);
    turns.placed(9, 1);
    turns.placed(0, 100);

    CHECK(turns.is_next(100));
    CHECK(turns.limit(10) == 0);
  }

  TEST_CASE("the limit of a cached prompt is that of its uncached tokens") {
    const auto placement = Placement::create({.max_engines = 2, .max_nodes = 1}).value();
    REQUIRE(placement->add_engine({}));
    REQUIRE(placement->add_engine({}));
    const std::vector<RouterId> before = {1};
    placement->set_turns(before, {});
    std::vector<Candidate> candidates = {{.engine = 0}, {.engine = 1}};
    const PlacementRequest request{
        .prompt_tokens = 1600, .block_tokens = 16, .candidates = candidates};

    CHECK(placement->turn_limit(request) == std::chrono::milliseconds(4));
    candidates[1].gpu_blocks = candidates[1].local_blocks = 100;
    CHECK(placement->turn_limit(request) < std::chrono::milliseconds(4));
  }

  TEST_CASE("a placement of a sibling ends the wait for it") {
    const auto placement = Placement::create({.max_engines = 2, .max_nodes = 1}).value();
    REQUIRE(placement->add_engine({}));
    const std::vector<RouterId> before = {1};
    placement->set_turns(before, {});
    REQUIRE_FALSE(placement->is_turn(at(5)));

    placement->apply(placed_by(1, 7), at(5));

    CHECK(placement->is_turn(at(5)));
    CHECK(placement->turn_end(at(5), std::chrono::seconds(1)) == at(5));
  }

  TEST_CASE("the router's own placements count for its next turn") {
    const auto placement = Placement::create({.max_engines = 2, .max_nodes = 1}).value();
    const EngineId engine = placement->add_engine({}).value();
    const std::vector<RouterId> after = {1};
    placement->set_turns({}, after);
    REQUIRE(placement->is_turn(at(5)));

    REQUIRE(placement->placed(1, {.engine = engine, .uncached_tokens = 100}, 100, at(5)));

    CHECK_FALSE(placement->is_turn(at(5)));
    CHECK(placement->turn_end(at(5), std::chrono::seconds(1)) > at(5));
    placement->apply(placed_by(1, 7), at(5));
    CHECK(placement->is_turn(at(5)));
  }
}

}  // namespace
}  // namespace pegaflow::index
