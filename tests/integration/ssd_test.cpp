// A real server with an SSD tier on a file, and a client that compares every byte.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/support/hanging_reads.h"
#include "tests/support/nodes.h"
#include "tests/support/seed.h"
#include "tests/support/server_process.h"
#include "tests/support/test_engine.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kBlocks = 300;
constexpr std::size_t kBlockBytes = 16 * 1024;

/// The options of a server with 64 blocks in its pool, and 2,000 on disk.
ServerProcess::Options with_disk(const std::filesystem::path& file,
                                 const std::vector<std::string>& more = {}) {
  ServerProcess::Options options;
  options.pool_size = "1mb";
  options.arguments = {"--ssd-cache-path",      file.string(), "--ssd-cache-capacity", "32mb",
                       "--ssd-write-ahead",     "1mb",         "--ssd-segment-size",   "1mb",
                       "--reservation-timeout", "5s"};
  options.arguments.insert(options.arguments.end(), more.begin(), more.end());
  return options;
}

/// The same for a node of a cluster.
ServerProcess::Options node_with_disk(const std::string& address,
                                      const std::vector<std::string>& all,
                                      const std::filesystem::path& file) {
  return node_options(address, all, with_disk(file).arguments, "1mb");
}

std::string of_disk(const std::string& name, const std::filesystem::path& file,
                    const std::string& op = "") {
  const std::string more = op.empty() ? "" : ",op=\"" + op + "\"";
  return "pegaflow_" + name + "{disk=\"" + file.string() + "\"" + more + "}";
}

/// Waits until the disks have taken so many blocks. A server writes ahead only what is evicted
/// next.
void wait_for_writes(const ServerProcess& server, const std::vector<std::filesystem::path>& files,
                     std::size_t blocks) {
  const auto end = std::chrono::steady_clock::now() + kHang;
  double written = 0;
  while (written < static_cast<double>(blocks)) {
    REQUIRE(std::chrono::steady_clock::now() < end);
    written = 0;
    for (const auto& file : files) {
      written += server.metric(of_disk("ssd_written_blocks_total", file));
    }
  }
}

/// Whether the process has the file open.
bool has_open(pid_t pid, const std::filesystem::path& file) {
  std::error_code problem;
  for (const auto& each :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd", problem)) {
    if (std::filesystem::read_symlink(each.path(), problem) == file) return true;
  }
  return false;
}

/// An engine that is restarted with the server.
struct Engine {
  explicit Engine(const ServerProcess& server)
      : memory(engine_memory(2, kBlockBytes / 2, kBlocks)) {
    TestEngine::Options options;
    options.socket = server.socket();
    engine = std::make_unique<TestEngine>(std::move(options), memory, *device);
    engine->wait_ready();
  }
  /// Saves blocks in parts, each of which fits the pool.
  void save(std::uint64_t first, std::size_t count, const ServerProcess& server,
            const std::filesystem::path& file) {
    for (std::size_t done = 0; done < count; done += 30) {
      const std::size_t part = std::min<std::size_t>(30, count - done);
      CHECK_FALSE(engine->save(numbers_from(first + done, part), blocks_from(0, part)).error);
      saved += part;
      wait_for_writes(server, {file}, saved);
    }
  }
  /// Loads blocks in parts and compares them; returns the number that was found.
  std::size_t load(std::uint64_t first, std::size_t count) {
    std::size_t found = 0;
    for (std::size_t done = 0; done < count; done += 10) {
      const auto numbers = numbers_from(first + done, 10);
      const auto claimed = engine->claim(numbers);
      REQUIRE(claimed);
      if (claimed->token.is_none() || claimed->blocks == 0) continue;
      const std::vector<std::uint32_t> to = blocks_from(100, claimed->blocks);
      const Mover::Finished loaded = engine->load(claimed->token, to);
      engine->session().unclaim(claimed->token);
      if (!loaded.error && loaded.failed_blocks.empty()) {
        CHECK(engine->wrong_blocks(numbers_from(first + done, claimed->blocks), to) == 0);
        found += claimed->blocks;
      }
    }
    return found;
  }

  EngineMemory memory;
  std::unique_ptr<HostDevice> device = HostDevice::create({.threads = 2}).value();
  std::unique_ptr<TestEngine> engine;
  std::size_t saved = 0;
};

/// Waits until the blocks of an earlier process are found.
void wait_for_scan(const ServerProcess& server, const std::filesystem::path& file) {
  REQUIRE(disk_is_ready(server, file));
}

/// A server with a disk that is ready.
struct OnDisk {
  explicit OnDisk(const std::vector<std::string>& more = {})
      : file(directory.path() / "cache"), server(with_disk(file, more)) {
    wait_for_scan(server, file);
  }
  TemporaryDirectory directory;
  std::filesystem::path file;
  ServerProcess server;
};

/// Requested blocks that were missing in the pool, by all reasons or by one.
double missing(const ServerProcess& server, const std::string& reason = "") {
  double sum = 0;
  for (const std::string name :
       {"new", "evicted", "cleanup", "reset", "no_room", "save_failed", "corrupt", "disk_failed",
        "being_saved", "behind_hole", "coming", "other_tier"}) {
    if (!reason.empty() && name != reason) continue;
    sum += server.metric("pegaflow_cache_miss_blocks_total{reason=\"" + name + "\"}");
  }
  return sum;
}

/// Requests to a server from a seed, and how many blocks they asked for and found.
struct RandomLoad {
  explicit RandomLoad(Engine& at) : engine(at) {}
  void step(const ServerProcess& server) {
    const std::uint64_t first = 1000 * (1 + random() % 12);
    const std::size_t count = 1 + random() % 40;
    switch (random() % 10) {
      case 0:
      case 1:
      case 2:
        (void)engine.engine->save(numbers_from(first, count), blocks_from(0, count));
        return;
      case 3:
        if (random() % 4 == 0) (void)server.post("/cache/memory/cleanup");
        if (random() % 16 == 0) (void)engine.engine->session().reset_cache(kHang);
        return;
      case 4:
        (void)engine.load(first, 10);
        return;
      default:
        break;
    }
    const auto answer = engine.engine->lookup(numbers_from(first, count));
    REQUIRE(answer);
    asked += count;
    found += answer->blocks;
  }

  Engine& engine;
  std::mt19937_64 random{seed()};
  std::size_t asked = 0;
  std::size_t found = 0;
};

TEST_SUITE("the SSD tier") {
  TEST_CASE("each block that a lookup misses has one reason, over the pool and the disk") {
    MESSAGE("seed ", seed());
    OnDisk started;
    auto& [directory, file, server] = started;
    Engine engine(server);
    engine.save(1000, 120, server, file);
    RandomLoad load(engine);
    for (int i = 0; i < 600; ++i) {
      // From here on many reads fail.
      if (i == 400) std::filesystem::resize_file(file, 2 << 20);
      load.step(server);
    }

    const double hits = server.metric("pegaflow_cache_block_hits_total");
    const double misses = server.metric("pegaflow_cache_block_misses_total");
    const auto asked = static_cast<double>(load.asked);
    const auto found = static_cast<double>(load.found);
    CHECK(hits + misses == asked);
    CHECK(missing(server) == misses);
    // What the disk offers is no miss of the engine.
    CHECK(hits + missing(server, "other_tier") == found);
    CHECK(missing(server) - missing(server, "other_tier") == asked - found);
    for (const std::string reason : {"other_tier", "evicted", "new"}) {
      CHECK_MESSAGE(missing(server, reason) > 0, reason);
    }
  }

  TEST_CASE("a block that a disk does not deliver is missing for that reason") {
    OnDisk started;
    auto& [directory, file, server] = started;
    Engine engine(server);
    engine.save(1000, 120, server, file);
    REQUIRE(server.post("/cache/memory/cleanup").status == 200);
    std::filesystem::resize_file(file, 1 << 20);
    CHECK(engine.load(1000, 10) == 0);

    const auto answer = engine.engine->lookup(numbers_from(1000, 1));
    REQUIRE(answer);
    CHECK(answer->blocks == 0);
    CHECK(missing(server, "disk_failed") == 1);
  }

  TEST_CASE("blocks that left the pool come back from the disk byte for byte") {
    OnDisk started;
    auto& [directory, file, server] = started;
    Engine engine(server);
    engine.save(1000, 240, server, file);
    CHECK(server.metric("pegaflow_cache_block_evictions_total") > 100);

    CHECK(engine.load(1000, 240) == 240);

    CHECK(server.metric(of_disk("ssd_hits_blocks_total", file)) >= 176);
    CHECK(server.metric(of_disk("ssd_proof_failures_total", file)) == 0);
    CHECK(server.metric_becomes(R"(pegaflow_pool_slots{state="quarantined"})", 0));
    CHECK(server.get("/health").body.find("\"ssd\"") != std::string::npos);
  }

  TEST_CASE("a server that was killed is warm after its restart") {
    OnDisk started;
    auto& [directory, file, server] = started;
    {
      Engine engine(server);
      engine.save(1000, 240, server, file);
    }
    // Tables are written each second, and counted once they are.
    const double blocks = server.metric(of_disk("ssd_written_blocks_total", file)) * kBlockBytes;
    const double tables = 4096 * 4;
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (server.metric(of_disk("ssd_write_bytes_total", file)) < blocks + tables) {
      REQUIRE(std::chrono::steady_clock::now() < end);
    }
    server.kill();
    server.start();
    wait_for_scan(server, file);

    Engine engine(server);
    CHECK(engine.load(1000, 240) == 240);
    CHECK(server.metric(of_disk("ssd_proof_failures_total", file)) == 0);
  }

  TEST_CASE("damaged pages of a block are a miss, and no wrong byte") {
    OnDisk started;
    auto& [directory, file, server] = started;
    {
      Engine engine(server);
      engine.save(1000, 240, server, file);
    }
    server.terminate();
    {
      std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
      // In the data of the second and the third segment.
      for (const std::streamoff segment : {1, 2}) {
        bytes.seekp((std::streamoff{1} << 20) * (1 + segment) + (400 << 10));
        bytes.write("damage", 6);
      }
      REQUIRE(bytes.flush());
    }
    server.start();
    wait_for_scan(server, file);

    Engine engine(server);
    const std::size_t found = engine.load(1000, 240);

    CHECK(found < 240);
    CHECK(found >= 200);
    CHECK(server.metric(of_disk("ssd_proof_failures_total", file)) == 2);
  }

  TEST_CASE("after a reset no older block comes back, also after a kill") {
    OnDisk started;
    auto& [directory, file, server] = started;
    {
      Engine engine(server);
      engine.save(1000, 120, server, file);
      REQUIRE(engine.engine->session().reset_cache(kHang));
      CHECK(engine.load(1000, 120) == 0);
    }
    server.kill();
    server.start();
    wait_for_scan(server, file);

    Engine engine(server);
    CHECK(engine.load(1000, 120) == 0);
  }

  TEST_CASE("a foreign file and one that another server uses are refused by name") {
    TemporaryDirectory directory;
    const auto foreign = directory.path() / "foreign";
    {
      std::ofstream bytes(foreign);
      bytes << std::string(std::size_t{2} << 20, 'x');
    }
    std::filesystem::permissions(
        foreign, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
    auto options = with_disk(foreign);
    options.wait_until_ready = false;
    ServerProcess refused(options);
    CHECK(refused.wait_for_exit() == 1);
    CHECK(refused.log().find("another program") != std::string::npos);
    CHECK(refused.log().find("--ssd-format") != std::string::npos);

    const auto file = directory.path() / "cache";
    ServerProcess first(with_disk(file));
    options = with_disk(file, {"--pool-wait", "100ms"});
    options.wait_until_ready = false;
    ServerProcess second(options);
    CHECK(second.wait_for_exit() == 1);
    CHECK(second.log().find(file.string()) != std::string::npos);
  }
  TEST_CASE("a server that waits for the lock of a file at its start ends with a signal") {
    OnDisk started;
    auto& [directory, file, server] = started;
    auto second = harness::Child::start(
        {.command = {ServerProcess::binary().string(), "--addr",
                     "unix:" + (directory.path() / "x.sock").string(), "--http-addr", "127.0.0.1:0",
                     "--pool-size", "1mb", "--pool-wait", "10m", "--ssd-cache-path", file.string(),
                     "--ssd-cache-capacity", "32mb"},
         .log_file = (directory.path() / "log").string()});
    REQUIRE(second);
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (!has_open(second->pid(), file)) REQUIRE(std::chrono::steady_clock::now() < end);

    REQUIRE(second->signal(SIGTERM));
    CHECK(second->wait_for_exit(kHang) == -SIGTERM);
  }

  TEST_CASE("a capacity without room for two segments is refused with the file and the options") {
    const TemporaryDirectory directory;
    const auto file = directory.path() / "cache";
    const Ran refused = run_server_binary(
        {"--addr", "unix:" + (directory.path() / "x.sock").string(), "--http-addr", "127.0.0.1:0",
         "--pool-size", "1mb", "--ssd-cache-path", file.string(), "--ssd-cache-capacity", "64mb"});
    INFO(refused.output);
    CHECK(refused.exit_code == 1);
    CHECK(refused.output.find("--ssd-cache-path " + file.string()) != std::string::npos);
    CHECK(refused.output.find("raise --ssd-cache-capacity") != std::string::npos);
  }

  TEST_CASE("a server that is stopped writes its pool to the disk first") {
    OnDisk started;
    auto& [directory, file, server] = started;
    {
      Engine engine(server);
      // Half of the pool, whose blocks are written ahead only when more is saved.
      CHECK_FALSE(engine.engine->save(numbers_from(1000, 30), blocks_from(0, 30)).error);
    }
    CHECK(server.terminate() == 0);
    server.start();
    wait_for_scan(server, file);

    Engine engine(server);
    CHECK(engine.load(1000, 30) == 30);
  }

  TEST_CASE("two disks, read and written by threads, share the blocks") {
    TemporaryDirectory directory;
    const auto file = directory.path() / "cache";
    const auto second = directory.path() / "second";
    auto options = with_disk(file, {"--ssd-cache-path", second.string(), "--ssd-io", "threads"});
    ServerProcess server(options);
    wait_for_scan(server, file);
    wait_for_scan(server, second);
    {
      Engine engine(server);
      for (std::size_t done = 0; done < 240; done += 30) {
        CHECK_FALSE(engine.engine->save(numbers_from(1000 + done, 30), blocks_from(0, 30)).error);
        wait_for_writes(server, {file, second}, done + 30);
      }
      CHECK(server.metric(of_disk("ssd_written_blocks_total", file)) > 20);
      CHECK(server.metric(of_disk("ssd_written_blocks_total", second)) > 20);
      CHECK(engine.load(1000, 240) == 240);
    }
    const auto health = nlohmann::json::parse(server.get("/health").body);
    REQUIRE(health["ssd"].size() == 2);
    CHECK(health["ssd"][1]["io"] == "threads");
    CHECK(health["ssd"][1]["io_reason"] != "");
    CHECK(server.terminate() == 0);

    // One disk less: its blocks are misses.
    const ServerProcess fewer(with_disk(file, {"--ssd-cache-capacity", "16mb"}));
    wait_for_scan(fewer, file);
    Engine engine(fewer);
    CHECK(engine.load(1000, 240) < 240);
    CHECK(fewer.metric(of_disk("ssd_blocks", file)) > 20);
    CHECK(fewer.metric(of_disk("ssd_proof_failures_total", file)) == 0);
  }

  TEST_CASE("a disk that hangs holds up no read from another disk") {
    // More than the tier reads at once is in flight at the disk that hangs.
    constexpr std::size_t kLarge = 96;
    const HangingReads reads("first");
    TemporaryDirectory directory;
    const auto first = directory.path() / "first";
    const auto second = directory.path() / "second";
    ServerProcess::Options options;
    options.pool_size = "256mb";
    options.command_prefix = reads.command();
    options.arguments = {"--ssd-cache-path",
                         first.string() + "," + second.string(),
                         "--ssd-cache-capacity",
                         "256mb",
                         "--ssd-segment-size",
                         "16mb",
                         "--ssd-write-ahead",
                         "256mb",
                         "--ssd-io",
                         "threads",
                         "--fetch-deadline",
                         "100ms"};
    const ServerProcess server(options);
    wait_for_scan(server, first);
    wait_for_scan(server, second);
    EngineAt engine(server, 512 << 10, kLarge);
    CHECK_FALSE(engine.engine->save(numbers_from(1, kLarge), blocks_from(0, kLarge)).error);
    wait_for_writes(server, {first, second}, kLarge);
    const double at_second = server.metric(of_disk("ssd_written_blocks_total", second));
    REQUIRE(at_second > 4);
    REQUIRE(at_second < kLarge - 20);
    const auto load_each = [&] {
      REQUIRE(server.post("/cache/memory/cleanup").status == 200);
      double loaded = 0;
      for (std::uint64_t number = 1; number <= kLarge; ++number) {
        const auto claimed = engine.engine->claim({number});
        REQUIRE(claimed);
        if (claimed->blocks == 0) continue;
        loaded += engine.load_and_check(*claimed, number).failed_blocks.empty() ? 1 : 0;
      }
      return loaded;
    };

    reads.begin();
    load_each();
    CHECK(load_each() == at_second);
    CHECK(server.metric(of_disk("ssd_breaker_open", first)) == 1);
    CHECK(server.metric(of_disk("ssd_breaker_open", second)) == 0);
    reads.end();
    REQUIRE(server.metric_becomes(of_disk("ssd_breaker_open", first), 0));
    CHECK(load_each() == kLarge);
  }

  TEST_CASE("a block that is used outlives many laps of the log") {
    OnDisk started({"--ssd-cache-capacity", "16mb"});  // About 900 blocks.
    auto& [directory, file, server] = started;
    Engine engine(server);
    engine.save(1000, 60, server, file);
    // Four times what fits the disk; the first ten are used again now and then.
    std::size_t found = 0;
    for (std::uint64_t other = 0; other < 3600; other += 60) {
      engine.save(5000 + other, 60, server, file);
      found = engine.load(1000, 10);
      if (found != 10) break;
    }

    CHECK(found == 10);
    CHECK(server.metric("pegaflow_ssd_renewed_blocks_total") >= 10);
    CHECK(server.metric(of_disk("ssd_reclaimed_blocks_total", file)) > 0);
    CHECK(engine.load(1030, 30) == 0);  // Those that were not used are gone.
  }

  TEST_CASE("a file that is cut under the server gives misses, and no wrong byte") {
    OnDisk started;
    auto& [directory, file, server] = started;
    Engine engine(server);
    engine.save(1000, 240, server, file);
    std::filesystem::resize_file(file, 3 << 20);

    const std::size_t found = engine.load(1000, 240);

    CHECK(found < 240);
    // The server goes on with its pool.
    CHECK_FALSE(engine.engine->save(numbers_from(9000, 10), blocks_from(0, 10)).error);
    CHECK(engine.load(9000, 10) == 10);
    // A later write may have made the file longer again, with zeros in between.
    CHECK(server.metric(of_disk("ssd_errors_total", file, "read")) +
              server.metric(of_disk("ssd_proof_failures_total", file)) >
          0);
    CHECK(server.metric_becomes(R"(pegaflow_pool_slots{state="quarantined"})", 0));
  }

  TEST_CASE("a cleanup empties the disk, also for the next process") {
    OnDisk started;
    auto& [directory, file, server] = started;
    {
      Engine engine(server);
      engine.save(1000, 240, server, file);
      const auto report = nlohmann::json::parse(server.post("/cache/ssd/cleanup").body);
      CHECK(report["dropped_blocks"] == 240);
      CHECK(server.post("/cache/memory/cleanup").status == 200);
      CHECK(engine.load(1000, 240) == 0);
    }
    server.kill();
    server.start();
    wait_for_scan(server, file);
    Engine engine(server);
    CHECK(engine.load(1000, 240) == 0);

    ServerProcess without;
    const auto refused = without.post("/cache/ssd/cleanup");
    CHECK(refused.status == 409);
    CHECK(refused.body.find("--ssd-cache-path") != std::string::npos);
  }

  TEST_CASE("a budget limits what is written, and the rest is counted") {
    // An hour of it are 1.7 MB, half of which is for blocks that were used: about 50 blocks.
    OnDisk started({"--ssd-write-budget", "40mb"});
    auto& [directory, file, server] = started;
    Engine engine(server);
    for (std::uint64_t first = 0; first < 240; first += 30) {
      CHECK_FALSE(engine.engine->save(numbers_from(1000 + first, 30), blocks_from(0, 30)).error);
    }
    REQUIRE(
        server.metric_becomes("pegaflow_ssd_bytes_in_flight{disk=\"" + file.string() + "\"}", 0));

    // Those that were evicted before their write had ended count too.
    const double blocks = server.metric(of_disk("ssd_write_bytes_total", file)) / kBlockBytes;
    CHECK(blocks >= 30);
    CHECK(blocks <= 60);
    CHECK(server.metric(R"(pegaflow_ssd_rejected_blocks_total{reason="budget"})") > 100);
  }

  TEST_CASE("a node that was down during a reset serves no older block") {
    TemporaryDirectory directory;
    const auto file = directory.path() / "cache";
    const std::vector<std::string> at = node_addresses(2);
    const ServerProcess peer(node_options(at[0], at));
    ServerProcess server(node_with_disk(at[1], at, file));
    const auto restart = [&] {
      server.start();
      wait_for_scan(server, file);
      REQUIRE(server.metric_becomes("pegaflow_ssd_waits_for_peers", 0));
    };
    wait_for_scan(server, file);
    {
      Engine engine(server);
      engine.save(1000, 120, server, file);
    }
    CHECK(server.terminate() == 0);
    restart();
    {
      Engine engine(server);
      CHECK(engine.load(1000, 120) == 120);  // There was no reset.
    }
    CHECK(server.terminate() == 0);
    {
      Engine elsewhere(peer);
      REQUIRE(elsewhere.engine->session().reset_cache(kHang));
    }
    restart();

    Engine engine(server);
    CHECK(engine.load(1000, 120) == 0);
  }

  TEST_CASE(
      "without its peers a node serves no block of an earlier process, unless an option allows "
      "it") {
    TemporaryDirectory directory;
    const auto file = directory.path() / "cache";
    const std::vector<std::string> at = node_addresses(2);  // None listens at the first.
    ServerProcess server(node_with_disk(at[1], at, file));
    wait_for_scan(server, file);
    {
      Engine engine(server);
      engine.save(1000, 120, server, file);
      CHECK(engine.load(1000, 120) == 120);  // Its own blocks.
    }
    CHECK(server.terminate() == 0);
    server.start();
    wait_for_scan(server, file);
    {
      Engine engine(server);
      CHECK(engine.load(1000, 120) == 0);
      CHECK(server.metric("pegaflow_ssd_waits_for_peers") == 1);
    }
    CHECK(server.terminate() == 0);
    auto options = node_with_disk(at[1], at, file);
    options.arguments.emplace_back("--ssd-serve-before-peers");
    const ServerProcess serves(options);
    wait_for_scan(serves, file);
    Engine engine(serves);
    CHECK(engine.load(1000, 120) == 120);
  }
}

}  // namespace
}  // namespace pegaflow::testing
