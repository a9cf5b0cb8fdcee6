#include "router/routing/engine_load.h"

#include <string>

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

/// As vLLM 0.32 writes it.
constexpr const char* kPage =
    R"(# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_running{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 12.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.9375
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1e-3
http_requests_total{handler="/metrics"} 7.0
)";

TEST_SUITE("read_engine_load") {
  TEST_CASE("each rank of a vLLM has its queue, its batch and its memory") {
    const auto loads = read_engine_load(kPage);

    REQUIRE(loads.size() == 2);
    CHECK(loads[0].rank == 0);
    CHECK(loads[0].load.waiting == 12);
    CHECK(loads[0].load.running == 4);
    CHECK(loads[0].load.kv_use == doctest::Approx(0.9375));
    CHECK(loads[1].rank == 1);
    CHECK(loads[1].load.waiting == 0);
    CHECK(loads[1].load.kv_use == doctest::Approx(0.001));
  }

  TEST_CASE("SGLang's names and samples without labels are read, too") {
    const auto loads = read_engine_load(
        "sglang:num_queue_reqs{model_name=\"m\",dp_rank=\"3\"} 2.0\nsglang:token_usage 0.5");

    REQUIRE(loads.size() == 2);
    CHECK(loads[0].rank == 3);
    CHECK(loads[0].load.waiting == 2);
    CHECK(loads[1].rank == 0);
    CHECK(loads[1].load.kv_use == doctest::Approx(0.5));
  }

  TEST_CASE("a name of a model that looks like labels confuses nothing") {
    const auto loads = read_engine_load(
        "vllm:num_requests_waiting{model_name=\"engine=} 7,\",engine=\"2\"} 5.0\n");

    REQUIRE(loads.size() == 1);
    CHECK(loads[0].rank == 2);
    CHECK(loads[0].load.waiting == 5);
  }

  TEST_CASE("lines without a load are left out") {
    for (const char* const page :
         {"", "\n\n", "not found", "vllm:num_requests_waiting", "vllm:num_requests_waiting ",
          "vllm:num_requests_waiting{engine=\"0\"", "vllm:num_requests_waiting{engine=\"0\"} x",
          "vllm:num_requests_waiting{engine=\"0\"} NaN", "vllm:num_requests_waiting{} +Inf",
          "vllm:num_requests_waiting{engine=\"99999999999\"} 1",
          "vllm:num_requests_waiting{engine=\"1024\"} 1",
          "vllm:num_requests_waiting{engine=\"x\"} 1"}) {
      CAPTURE(page);
      CHECK(read_engine_load(page).empty());
    }
  }

  TEST_CASE("values out of range are cut to it") {
    const auto loads = read_engine_load(
        "vllm:num_requests_waiting -3\nvllm:num_requests_running 1e300\n"
        "vllm:kv_cache_usage_perc 17\n");

    REQUIRE(loads.size() == 1);
    CHECK(loads[0].load.waiting == 0);
    CHECK(loads[0].load.running == 1'000'000'000);
    CHECK(loads[0].load.kv_use == 1);
  }
}

}  // namespace
}  // namespace pegaflow::router
