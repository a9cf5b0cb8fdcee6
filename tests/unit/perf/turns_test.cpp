#include "perf/server/turns.h"

#include <cmath>

#include <doctest/doctest.h>

namespace pegaflow::perf {
namespace {

harness::ServerProcess::Metrics page(int up_to_100us, int up_to_500us, int up_to_1ms, int all) {
  return harness::parse_metrics(fmt::format(
      "t_bucket{{le=\"0.0001\"}} {}\nt_bucket{{le=\"0.0005\"}} {}\nt_bucket{{le=\"0.001\"}} {}\n"
      "t_bucket{{le=\"+Inf\"}} {}\n",
      up_to_100us, up_to_500us, up_to_1ms, all));
}

TEST_SUITE("turns") {
  TEST_CASE("only iterations between the two readings count") {
    // The iteration above 1 ms was before.
    const Turns turns =
        turns_between(page(10, 20, 20, 21), page(12, 25, 25, 26), "t", "longest").value();
    CHECK(turns.count == 5);
    CHECK(turns.longest_seconds == doctest::Approx(0.0005));
    CHECK(turns.above_500us == 0);
  }

  TEST_CASE("iterations above 500 us are counted") {
    const Turns turns = turns_between(page(0, 0, 0, 0), page(5, 6, 8, 9), "t", "longest").value();
    CHECK(turns.above_500us == 3);
    CHECK(std::isinf(turns.longest_seconds));
  }

  TEST_CASE("the gauge of the longest iteration is exact if it rose in between") {
    harness::ServerProcess::Metrics before = page(0, 0, 0, 0);
    harness::ServerProcess::Metrics after = page(1, 2, 2, 2);
    before["longest"] = 0.0002;
    after["longest"] = 0.0003;
    CHECK(turns_between(before, after, "t", "longest").value().longest_seconds == 0.0003);
    before["longest"] = 0.0003;
    CHECK(turns_between(before, after, "t", "longest").value().longest_seconds ==
          doctest::Approx(0.0005));
  }

  TEST_CASE("a first reading without the histogram counts as zero") {
    CHECK(turns_between({}, page(1, 1, 1, 1), "t", "longest").value().longest_seconds ==
          doctest::Approx(0.0001));
  }

  TEST_CASE("no iteration, no histogram and no edge at 500 us are errors") {
    CHECK(turns_between(page(1, 1, 1, 1), page(1, 1, 1, 1), "t", "longest").error().code ==
          Errc::kInternal);
    CHECK(turns_between({}, {}, "t", "longest").error().code == Errc::kInternal);
    const auto coarse =
        harness::parse_metrics("t_bucket{le=\"0.001\"} 3\nt_bucket{le=\"+Inf\"} 3\n");
    CHECK(turns_between({}, coarse, "t", "longest").error().code == Errc::kInternal);
  }
}

}  // namespace
}  // namespace pegaflow::perf
