#include "server/options.h"

#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::server {
namespace {

TEST_SUITE("ServerOptions") {
  TEST_CASE("every established flag is accepted") {
    ServerOptions options;
    OptionTable table("pegaflow-server", "test");
    options.declare(table);
    const std::vector<const char*> words = {"pegaflow-server",
                                            "--addr=127.0.0.1:50056",
                                            "--devices=0,1",
                                            "--device=0",
                                            "--pool-size=30gb",
                                            "--hint-value-size=1mb",
                                            "--use-hugepages",
                                            "--disable-lfu-admission",
                                            "--metrics-addr=0.0.0.0:9090",
                                            "--http-addr=127.0.0.1:0",
                                            "--log-level=debug",
                                            "--ssd-cache-path=/x",
                                            "--ssd-cache-capacity=1tb",
                                            "--ssd-write-queue-depth=8",
                                            "--ssd-prefetch-queue-depth=2",
                                            "--ssd-write-inflight=2",
                                            "--ssd-prefetch-inflight=16",
                                            "--max-prefetch-blocks=800",
                                            "--metric-hll-windows=15m,1h,1d",
                                            "--metric-hll-bucket-bits=16"};
    std::ostringstream out;

    const auto next = table.parse(static_cast<int>(words.size()), words.data(), out);

    REQUIRE(next);
    CHECK(*next == OptionTable::Next::kRun);
    CHECK(options.pool_size_bytes == std::uint64_t{30} << 30);
    CHECK(options.use_hugepages);
    CHECK(options.addr == "127.0.0.1:50056");
    CHECK(options.metric_windows == std::vector<std::string>{"15m", "1h", "1d"});
    CHECK(table.ignored().size() == 10);
    CHECK(options.ssd_cache_path == std::vector<std::string>{"/x"});
    CHECK(options.ssd_cache_capacity_bytes == std::uint64_t{1} << 40);
    CHECK(options.ssd_backend() == DiskBackend::kAuto);
    CHECK(options.eviction_policy() == engine::EvictionKind::kLru);
  }

  TEST_CASE("windows are times of whole seconds, or days") {
    using std::chrono::seconds;
    ServerOptions options;
    options.metric_windows = {"90s", "5m", "2h", "1d", "0.5D"};
    REQUIRE(options.window_lengths());
    CHECK(*options.window_lengths() == std::vector<seconds>{seconds(90), seconds(300),
                                                            seconds(7200), seconds(86400),
                                                            seconds(43200)});
    for (const char* const wrong : {"5", "1w", "0m", "1500ms", "d", "-1h", ""}) {
      CAPTURE(wrong);
      options.metric_windows = {wrong};
      const auto lengths = options.window_lengths();
      REQUIRE_FALSE(lengths);
      CHECK(lengths.error().code == Errc::kInvalidArgument);
      CHECK(lengths.error().detail.find("--metric-hll-windows") == 0);
    }
  }

  TEST_CASE("a policy is named, or set by a flag; contradictions are refused") {
    ServerOptions options;
    CHECK(options.eviction_policy() == engine::kDefaultEviction);
    options.eviction = "s3-fifo";
    CHECK(options.eviction_policy() == engine::EvictionKind::kS3Fifo);
    options.enable_lfu_admission = true;
    CHECK(options.eviction_policy().error().code == Errc::kInvalidArgument);
    options.eviction = "weighted-lru";
    CHECK(options.eviction_policy() == engine::EvictionKind::kWeightedLru);
    options.disable_lfu_admission = true;
    CHECK(options.eviction_policy().error().code == Errc::kInvalidArgument);
    options.enable_lfu_admission = false;
    CHECK(options.eviction_policy() == engine::EvictionKind::kLru);

    options.eviction = "adaptive";
    options.disable_lfu_admission = false;
    CHECK(options.eviction_policy() == engine::EvictionKind::kAdaptive);

    options.eviction = "fifo";
    const auto unknown = options.eviction_policy();

    REQUIRE_FALSE(unknown);
    CHECK(unknown.error().code == Errc::kInvalidArgument);
    CHECK(unknown.error().detail ==
          "--eviction: unknown eviction policy \"fifo\"; use " + engine::eviction_names());
  }

  TEST_CASE("uids are numbers") {
    ServerOptions options;
    options.allow_uid = {"0", "1000"};
    REQUIRE(options.allowed_uids());
    CHECK(*options.allowed_uids() == std::vector<std::uint32_t>{0, 1000});
    options.allow_uid = {"1000x"};
    CHECK(options.allowed_uids().error().code == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::server
