#include "perf/disk/fio.h"

#include <doctest/doctest.h>

namespace pegaflow::perf {
namespace {

constexpr const char* kReport = R"(note: both iodepth >= 1 and synchronous I/O engine are selected
{
  "fio version" : "fio-3.33",
  "jobs" : [ {
    "jobname" : "bound", "error" : 0,
    "read" : {"io_bytes" : 2147483648, "bw_bytes" : 1500000000},
    "write" : {"io_bytes" : 0, "bw_bytes" : 0},
    "job_runtime" : 1430, "usr_cpu" : 2.0, "sys_cpu" : 8.0
  } ]
})";

TEST_SUITE("fio") {
  TEST_CASE("rate and CPU time are read from the report, behind its notes") {
    const auto rate = parse_fio(kReport);
    REQUIRE(rate);
    CHECK(rate->gigabytes_per_second == doctest::Approx(1.5));
    CHECK(rate->cpu_ms_per_gib == doctest::Approx(71.5));
  }

  TEST_CASE("a report of a failed or empty run, and other text, are corrupt") {
    std::string failed = kReport;
    failed.replace(failed.find("\"error\" : 0"), 11, "\"error\" : 5");
    std::string empty = kReport;
    empty.replace(empty.find("2147483648"), 10, "0");
    for (const std::string& text :
         {failed, empty, std::string("fio: no such file"), std::string("{"),
          std::string("{\"jobs\": []}"), std::string()}) {
      const auto rate = parse_fio(text);
      REQUIRE_FALSE(rate);
      CHECK(rate.error().code == Errc::kCorrupt);
    }
  }
}

}  // namespace
}  // namespace pegaflow::perf
