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

TEST_SUITE("Turns") {
  TEST_CASE("a router waits for the routers before it, and for no other one") {
    Turns turns(4);
    CHECK(turns.is_next(100));

    const std::vector<RouterId> before = {1, 2};
    turns.set_before(before);
    CHECK_FALSE(turns.is_next(100));

    turns.placed(3, 100);
    turns.placed(1, 100);
    CHECK_FALSE(turns.is_next(100));
    turns.placed(2, 100.0005);
    CHECK(turns.is_next(100));

    turns.set_before({});
    CHECK(turns.is_next(200));
  }

  TEST_CASE("a placement of an earlier instant ends no wait") {
    Turns turns(4);
    const std::vector<RouterId> before = {1};
    turns.set_before(before);

    turns.placed(1, 100);

    CHECK(turns.is_next(100 + Turns::kInstant / 2));
    CHECK_FALSE(turns.is_next(100 + 2 * Turns::kInstant));
  }

  TEST_CASE("the limit grows with the routers before, up to a share of the prefill") {
    Turns turns(8);
    CHECK(turns.limit(10) == 0);

    const std::vector<RouterId> before = {1, 2, 3};
    turns.set_before(before);

    CHECK(turns.limit(10) == doctest::Approx(3 * Turns::kEach));
    CHECK(turns.limit(0.01) == doctest::Approx(Turns::kShare * 0.01));
  }

  TEST_CASE("routers that do not exist are left out") {
    Turns turns(2);
    const std::vector<RouterId> before = {0, 2, 9};
    turns.set_before(before);
    turns.placed(9, 1);

    CHECK(turns.is_next(100));
    CHECK(turns.limit(10) == 0);
  }

  TEST_CASE("the limit of a cached prompt is that of its uncached tokens") {
    const auto placement = Placement::create({.max_engines = 2, .max_nodes = 1}).value();
    REQUIRE(placement->add_engine({}));
    REQUIRE(placement->add_engine({}));
    const std::vector<RouterId> before = {1};
    placement->set_routers_before(before);
    std::vector<Candidate> candidates = {{.engine = 0}, {.engine = 1}};
    const PlacementRequest request{
        .prompt_tokens = 1600, .block_tokens = 16, .candidates = candidates};

    CHECK(placement->turn_limit(request) == std::chrono::milliseconds(1));
    candidates[1].gpu_blocks = candidates[1].local_blocks = 100;
    CHECK(placement->turn_limit(request) < std::chrono::milliseconds(1));
  }

  TEST_CASE("a placement of a sibling ends the wait for it") {
    const auto placement = Placement::create({.max_engines = 2, .max_nodes = 1}).value();
    REQUIRE(placement->add_engine({}));
    const std::vector<RouterId> before = {1};
    placement->set_routers_before(before);
    REQUIRE_FALSE(placement->is_turn(at(5)));

    placement->apply(placed_by(1, 7), at(5));

    CHECK(placement->is_turn(at(5)));
  }
}

}  // namespace
}  // namespace pegaflow::index
