#include "engine/ssd/write_budget.h"

#include <doctest/doctest.h>

namespace pegaflow::engine::ssd {

TEST_SUITE("the budget of writes") {
  constexpr std::uint64_t kDay = std::uint64_t{86400} << 20;  // 1 MiB a second.

  TEST_CASE("without a limit everything may be written") {
    WriteBudget budget(0, TimePoint{});

    CHECK(budget.take(~std::uint64_t{0}, false, TimePoint{}));
    CHECK_FALSE(budget.is_limited());
  }

  TEST_CASE("an hour's writes may come at once, half of them by blocks that were never used") {
    WriteBudget budget(kDay, TimePoint{});

    CHECK(budget.take(std::uint64_t{1800} << 20, false, TimePoint{}));
    CHECK_FALSE(budget.take(1 << 20, false, TimePoint{}));
    CHECK(budget.take(std::uint64_t{1800} << 20, true, TimePoint{}));
    CHECK_FALSE(budget.take(1 << 20, true, TimePoint{}));
  }

  TEST_CASE("over a day no more is written than the budget and one burst") {
    WriteBudget budget(kDay, TimePoint{});
    std::uint64_t written = 0;
    TimePoint now{};
    for (int second = 0; second < 86400; ++second, now += std::chrono::seconds(1)) {
      while (budget.take(1 << 19, true, now)) written += 1 << 19;
    }

    CHECK(written >= kDay);
    CHECK(written <= kDay + kDay / 24);
  }
}

}  // namespace pegaflow::engine::ssd
