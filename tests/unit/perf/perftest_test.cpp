// The output of ucx_perftest.
#include <doctest/doctest.h>

#include "perf/net/net_perftest.h"

namespace pegaflow::perf {
namespace {

TEST_SUITE("ucx_perftest") {
  TEST_CASE("the last line has the latency and the rate") {
    const Result<Perftest> run = parse_perftest(
        "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n"
        " 300,1174.621,12351.817,9468.024,161.92,211.24,81,106\n");

    REQUIRE(run);
    CHECK(run->p50_us == doctest::Approx(1174.621));
    CHECK(run->gigabytes_per_second == doctest::Approx(0.2215).epsilon(0.001));
  }

  TEST_CASE("any other output is an error") {
    for (const char* const said : {
             "",
             "\n",
             "[1700000000.1] perftest.c:883 UCX ERROR connect() failed: Connection refused\n",
             "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,mr\n",
             "300,1,2,3,4,5,6\n",
             "300,1,2,3,4,5,6,7,8\n",
             "300,1,2,,4,5,6,7\n",
         }) {
      const Result<Perftest> run = parse_perftest(said);
      CAPTURE(said);
      REQUIRE_FALSE(run);
      CHECK(run.error().code == Errc::kCorrupt);
    }
  }
}

}  // namespace
}  // namespace pegaflow::perf
