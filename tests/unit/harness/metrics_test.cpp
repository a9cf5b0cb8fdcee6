#include <cmath>

#include <doctest/doctest.h>

#include "harness/server_process.h"

namespace pegaflow::harness {
namespace {

TEST_SUITE("metrics") {
  TEST_CASE("samples are found by name and labels") {
    const auto metrics = parse_metrics(
        "# HELP pegaflow_pins Pins now.\n"
        "# TYPE pegaflow_pins gauge\n"
        "pegaflow_pins 12\n"
        "pegaflow_quarantine_slots{reason=\"writer lost\"} 3\n"
        "pegaflow_rpc_turn_seconds_bucket{le=\"+Inf\"} 1e3\n"
        "\n"
        "not a sample\n"
        "last 1.5");
    CHECK(metrics.at("pegaflow_pins") == 12);
    CHECK(metrics.at("pegaflow_quarantine_slots{reason=\"writer lost\"}") == 3);
    CHECK(metrics.at("pegaflow_rpc_turn_seconds_bucket{le=\"+Inf\"}") == 1000);
    CHECK(metrics.at("last") == 1.5);
    CHECK(metrics.size() == 4);
  }

  TEST_CASE("an infinite value is a value") {
    CHECK(std::isinf(parse_metrics("age +Inf\n").at("age")));
  }

  TEST_CASE("a server that is not a program is an error") {
    const auto started = ServerProcess::start({.program = "/nonexistent", .pool_size = "1"});
    CHECK_FALSE(started);
  }

  TEST_CASE("a server that ends before it is ready is an error with its log") {
    const auto started = ServerProcess::start({.program = "/bin/false", .pool_size = "1"});
    REQUIRE_FALSE(started);
    CHECK(started.error().code == Errc::kInternal);
    CHECK(started.error().detail.find("ended before it was ready") != std::string::npos);
  }
}

}  // namespace
}  // namespace pegaflow::harness
