#include "engine/tables/free_runs.h"

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

namespace pegaflow::engine {
namespace {

/// The same result by a walk over all units.
struct Walk {
  std::vector<bool> free;

  [[nodiscard]] bool is_free(std::size_t first, std::size_t count) const {
    return std::all_of(free.begin() + static_cast<std::ptrdiff_t>(first),
                       free.begin() + static_cast<std::ptrdiff_t>(first + count),
                       [](bool unit) { return unit; });
  }
  [[nodiscard]] std::optional<std::uint32_t> lowest(std::uint32_t count) const {
    for (std::uint32_t first = 0; first + count <= free.size(); ++first) {
      if (is_free(first, count)) return first;
    }
    return std::nullopt;
  }
  [[nodiscard]] std::optional<std::uint32_t> highest(std::uint32_t count) const {
    for (std::size_t first = free.size(); first-- > 0;) {
      if (first + count <= free.size() && is_free(first, count)) {
        return static_cast<std::uint32_t>(first);
      }
    }
    return std::nullopt;
  }
  [[nodiscard]] std::uint32_t longest() const {
    std::uint32_t best = 0;
    std::uint32_t run = 0;
    for (const bool unit : free) best = std::max(best, run = unit ? run + 1 : 0);
    return best;
  }
};

TEST_SUITE("FreeRuns") {
  TEST_CASE("every search finds what a walk over all units finds, after any takes and gives") {
    std::mt19937_64 random(testing::seed());
    for (const std::uint32_t units : {1U, 2U, 7U, 64U, 100U}) {
      FreeRuns runs(units);
      Walk walk{std::vector<bool>(units, true)};
      for (int step = 0; step < 2000; ++step) {
        const auto first = static_cast<std::uint32_t>(random() % units);
        const auto wanted = static_cast<std::uint32_t>(1 + random() % 8);
        const std::uint32_t count = std::min(wanted, units - first);
        if (walk.is_free(first, count)) {
          runs.take(first, count);
          std::fill_n(walk.free.begin() + first, count, false);
        } else if (!walk.free[first]) {
          runs.give(first, 1);
          walk.free[first] = true;
        }
        REQUIRE(runs.longest() == walk.longest());
        REQUIRE(runs.is_free(first) == walk.free[first]);
        REQUIRE(runs.lowest(wanted) == walk.lowest(wanted));
        REQUIRE(runs.highest(wanted) == walk.highest(wanted));
      }
    }
  }

  TEST_CASE("a search among 65,536 units visits one tree node per level, found or not") {
    constexpr std::uint32_t kUnits = 65'536;
    FreeRuns runs(kUnits);
    for (std::uint32_t unit = 0; unit < kUnits; unit += 2) runs.take(unit, 1);
    const auto visited = [&](auto&& search) {
      const std::uint64_t before = runs.visited();
      search();
      return runs.visited() - before;
    };
    CHECK(visited([&] { CHECK(runs.lowest(1) == 1); }) <= 17);
    CHECK(visited([&] { CHECK(runs.highest(1) == kUnits - 1); }) <= 17);
    CHECK(visited([&] { CHECK_FALSE(runs.highest(2)); }) == 1);
    CHECK(visited([&] { runs.give(40'000, 1); }) <= 17);
    CHECK(visited([&] { CHECK(runs.highest(3) == 39'999); }) <= 17);
  }
}

}  // namespace
}  // namespace pegaflow::engine
