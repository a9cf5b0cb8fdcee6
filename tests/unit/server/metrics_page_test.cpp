#include "server/http/metrics_page.h"

#include <string>

#include <doctest/doctest.h>

namespace pegaflow::server {
namespace {

bool has_line(const std::string& page, const std::string& line) {
  return ("\n" + page).find("\n" + line + "\n") != std::string::npos;
}

TEST_SUITE("metrics_page") {
  TEST_CASE("values have their established metric names") {
    Snapshot now;
    now.pool_bytes = 1 << 20;
    now.cache.store.used_bytes = 81920;
    now.cache.store.sealed = 7;
    now.cache.store.sealed_bytes = 57344;
    now.cache.store.extents_taken = 4;
    now.cache.shapes = {{.frame_bytes = 8192, .extents = 2, .used = 7},
                        {.frame_bytes = 4096, .extents = 1, .used = 5},
                        {.frame_bytes = 8192, .extents = 1, .used = 1}};
    now.cache.store.quarantined_writer_lost = 2;
    now.cache.load_bytes = 12345;
    now.cache.load_blocks_other = 3;
    now.oldest_pin_seconds = 1.5;

    const std::string page = metrics_page(now);

    CHECK(has_line(page, "pegaflow_pool_capacity_bytes 1048576"));
    CHECK(has_line(page, "pegaflow_pool_used_bytes 81920"));
    CHECK(has_line(page, "pegaflow_cache_resident_bytes 57344"));
    CHECK(has_line(page, R"(pegaflow_pool_extents{block_bytes="8192"} 3)"));
    CHECK(has_line(page, R"(pegaflow_pool_blocks{block_bytes="4096"} 5)"));
    CHECK(has_line(page, "pegaflow_pool_extents_taken_total 4"));
    CHECK(has_line(page, "pegaflow_load_bytes_total 12345"));
    CHECK(has_line(page, R"(pegaflow_load_blocks_total{written_by="another_process"} 3)"));
    CHECK(has_line(page, R"(pegaflow_load_blocks_total{written_by="this_process"} 0)"));
    CHECK(has_line(page, R"(pegaflow_quarantine_slots{reason="writer_lost"} 2)"));
    CHECK(has_line(page, "pegaflow_oldest_pin_seconds 1.5"));
    CHECK(has_line(page, "# TYPE pegaflow_save_bytes_total counter"));
  }

  TEST_CASE("the eviction policy is named, and no other") {
    for (const engine::EvictionKind kind : engine::kEvictionKinds) {
      Snapshot now;
      now.cache.store.eviction = kind;

      const std::string page = metrics_page(now);

      for (const engine::EvictionKind each : engine::kEvictionKinds) {
        CAPTURE(to_string(each));
        const std::string line =
            "pegaflow_eviction_info{policy=\"" + std::string(to_string(each)) + "\"} 1";
        CHECK(has_line(page, line) == (each == kind));
      }
      CHECK(page.find("pegaflow_eviction_info{") == page.rfind("pegaflow_eviction_info{"));
    }
  }

  TEST_CASE("misses have a reason, and removed blocks an age") {
    Snapshot now;
    now.cache.store.misses[static_cast<std::size_t>(engine::Miss::kNew)] = 7;
    now.cache.store.misses[static_cast<std::size_t>(engine::Miss::kBehindHole)] = 3;
    now.cache.lookup_blocks_not_served = 2;
    now.cache.store.evicted_age.record(61);
    now.cache.store.evicted_idle.record(60);
    now.cache.next_victim_idle_s = 42;

    const std::string page = metrics_page(now);

    CHECK(has_line(page, R"(pegaflow_cache_miss_blocks_total{reason="new"} 7)"));
    CHECK(has_line(page, R"(pegaflow_cache_miss_blocks_total{reason="evicted"} 0)"));
    CHECK(has_line(page, R"(pegaflow_cache_miss_blocks_total{reason="behind_hole"} 3)"));
    CHECK(has_line(page, R"(pegaflow_cache_miss_blocks_total{reason="not_served"} 2)"));
    const std::string age = "pegaflow_cache_residence_seconds";
    CHECK(has_line(page, age + R"(_bucket{reason="evicted",le="60"} 0)"));
    CHECK(has_line(page, age + R"(_bucket{reason="evicted",le="300"} 1)"));
    CHECK(has_line(page, age + R"(_sum{reason="evicted"} 61)"));
    CHECK(has_line(page, age + R"(_count{reason="dropped"} 0)"));
    CHECK(has_line(page, R"(pegaflow_cache_evicted_idle_seconds_bucket{le="60"} 1)"));
    CHECK(has_line(page, "pegaflow_cache_next_victim_idle_seconds 42"));
  }

  TEST_CASE("each window has its hit rate, its ceiling and its working set") {
    using std::chrono::seconds;
    Snapshot now;
    now.cache.demand = {{.length = seconds(90), .requested = 0},
                        {.length = seconds(300),
                         .requested = 200,
                         .found = 50,
                         .fresh = 30,
                         .distinct = 110,
                         .bytes = 450560},
                        {.length = seconds(7200), .requested = 200, .found = 50, .fresh = 170},
                        {.length = seconds(86400), .requested = 200, .found = 50, .fresh = -1}};

    const std::string page = metrics_page(now);

    CHECK(has_line(page, R"(pegaflow_window_hit_rate{window="90s"} 0)"));
    CHECK(has_line(page, R"(pegaflow_hll_estimated_hit_rate{window="90s"} 0)"));
    CHECK(has_line(page, R"(pegaflow_hll_total_requests{window="5m"} 200)"));
    CHECK(has_line(page, R"(pegaflow_hll_cardinality{window="5m"} 110)"));
    CHECK(has_line(page, R"(pegaflow_window_hit_rate{window="5m"} 0.25)"));
    CHECK(has_line(page, R"(pegaflow_hll_estimated_hit_rate{window="5m"} 0.85)"));
    CHECK(has_line(page, R"(pegaflow_window_working_set_bytes{window="5m"} 450560)"));
    // An estimate; the ceiling is never below the hit rate, nor above 1.
    CHECK(has_line(page, R"(pegaflow_hll_estimated_hit_rate{window="2h"} 0.25)"));
    CHECK(has_line(page, R"(pegaflow_hll_estimated_hit_rate{window="1d"} 1)"));
  }

  TEST_CASE("calls are counted by method and status, times in cumulative buckets") {
    Snapshot now;
    auto& reserve = now.rpc.of(Method::kReserve);
    reserve.ok = 5;
    reserve.failed[static_cast<std::size_t>(Errc::kGone)] = 2;
    reserve.duration.record(std::chrono::microseconds(30));
    reserve.duration.record(std::chrono::microseconds(500));
    reserve.duration.record(std::chrono::seconds(3));

    const std::string page = metrics_page(now);

    CHECK(has_line(page, R"(pegaflow_rpc_requests_total{method="reserve",status="ok"} 5)"));
    CHECK(has_line(page, R"(pegaflow_rpc_requests_total{method="reserve",status="gone"} 2)"));
    const std::string name = "pegaflow_rpc_duration_seconds";
    CHECK(has_line(page, name + R"(_bucket{method="reserve",le="2e-05"} 0)"));
    CHECK(has_line(page, name + R"(_bucket{method="reserve",le="5e-05"} 1)"));
    CHECK(has_line(page, name + R"(_bucket{method="reserve",le="0.0005"} 2)"));
    CHECK(has_line(page, name + R"(_bucket{method="reserve",le="1"} 2)"));
    CHECK(has_line(page, name + R"(_bucket{method="reserve",le="+Inf"} 3)"));
    CHECK(has_line(page, name + R"(_count{method="reserve"} 3)"));
  }
}

}  // namespace
}  // namespace pegaflow::server
