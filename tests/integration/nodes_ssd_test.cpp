// Two real nodes, of which one has a disk: the other loads blocks that are only on that disk, and
// compares every byte.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/hanging_reads.h"
#include "tests/support/nodes.h"
#include "tests/support/server_process.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = 8 * 1024;
constexpr std::size_t kBlocks = 200;
/// The owner's pool has 128 blocks, of which 16 may be staged at once.
const std::string kOwnerPool = "2mb";

/// Two nodes: `owner` has a disk and a small pool, `reader` neither.
struct Pair {
  explicit Pair(const HangingReads* hanging = nullptr)
      : file(directory.path() / "cache"),
        owner(owner_options(hanging)),
        reader(node_options(at[1], at)) {
    REQUIRE(disk_is_ready(owner, file));
    REQUIRE(sees(reader, at[0]));
    REQUIRE(sees(owner, at[1]));
    REQUIRE(owner.metric_becomes("pegaflow_ssd_waits_for_peers", 0));
  }
  [[nodiscard]] ServerProcess::Options owner_options(const HangingReads* hanging) const {
    std::vector<std::string> disk = {
        "--ssd-cache-path",   file.string(), "--ssd-cache-capacity", "64mb",
        "--ssd-segment-size", "1mb",         "--ssd-write-ahead",    "2mb"};
    // The owner gives up sooner than the reader.
    if (hanging != nullptr) {
      disk.insert(disk.end(), {"--ssd-io", "threads", "--fetch-deadline", "1s"});
    }
    ServerProcess::Options options = node_options(at[0], at, std::move(disk), kOwnerPool);
    if (hanging != nullptr) options.command_prefix = hanging->command();
    return options;
  }
  [[nodiscard]] double written() const {
    return owner.metric("pegaflow_ssd_written_blocks_total{disk=\"" + file.string() + "\"}");
  }
  /// Saves the blocks at the owner and empties its pool: from now on only the disk has them.
  void save_to_disk(std::uint64_t first, std::size_t count) {
    const double before = written();
    CHECK_FALSE(at_owner().engine->save(numbers_from(first, count), blocks_from(0, count)).error);
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (written() < before + static_cast<double>(count)) {
      REQUIRE(std::chrono::steady_clock::now() < end);
    }
    empty_pool();
  }
  void empty_pool() const {
    REQUIRE(owner.post("/cache/memory/cleanup").status == 200);
    REQUIRE(owner.metric_becomes("pegaflow_cache_resident_blocks", 0));
  }
  EngineAt& at_owner() {
    if (!owners_engine) owners_engine.emplace(owner, kPiece, kBlocks);
    return *owners_engine;
  }
  EngineAt& at_reader() {
    if (!readers_engine) readers_engine.emplace(reader, kPiece, kBlocks);
    return *readers_engine;
  }
  /// Claims and loads the blocks at the reader, a part each time; returns how many were right.
  std::size_t load(std::uint64_t first, std::size_t count, std::size_t part) {
    std::size_t loaded = 0;
    for (std::size_t done = 0; done < count; done += part) {
      const auto claimed = at_reader().engine->claim(numbers_from(first + done, part));
      REQUIRE(claimed);
      if (claimed->blocks == 0) continue;
      const Mover::Finished finished = at_reader().load_and_check(*claimed, first + done);
      loaded += claimed->blocks - finished.failed_blocks.size();
    }
    return loaded;
  }
  void check_rest() const {
    check_nothing_is_left(reader, std::nullopt);
    check_nothing_is_left(owner, std::nullopt);
    CHECK(owner.metric_becomes("pegaflow_ssd_staging_bytes", 0));
    CHECK(owner.metric_becomes("pegaflow_leases", 0));
  }

  TemporaryDirectory directory;
  std::filesystem::path file;
  std::vector<std::string> at = node_addresses(2);
  ServerProcess owner;
  ServerProcess reader;
  std::optional<EngineAt> owners_engine;
  std::optional<EngineAt> readers_engine;
};

TEST_SUITE("nodes with disks") {
  TEST_CASE("a node loads blocks that are only on another node's disk, byte for byte") {
    Pair nodes;
    nodes.save_to_disk(1000, 96);

    CHECK(nodes.load(1000, 96, 12) == 96);

    CHECK(nodes.owner.metric("pegaflow_ssd_staged_blocks_total") == 96);
    CHECK(nodes.reader.metric("pegaflow_fetch_pending_blocks_total") == 96);
    nodes.check_rest();
    // The disk has them, so they were not written again.
    CHECK(nodes.written() == 96);
    CHECK(nodes.owner.metric("pegaflow_replica_blocks") > 0);
  }

  TEST_CASE("a prompt of which a part is in the pool and a part on the disk is one prefix") {
    Pair nodes;
    nodes.save_to_disk(2000, 24);
    // The engine of the owner brings every third block back.
    for (std::uint64_t number = 2000; number < 2024; number += 3) {
      const auto claimed = nodes.at_owner().engine->claim({number});
      REQUIRE(claimed);
      CHECK(nodes.at_owner().load_and_check(*claimed, number).failed_blocks.empty());
    }

    const auto found = nodes.at_reader().engine->lookup(numbers_from(2000, 24));
    REQUIRE(found);
    CHECK(found->blocks == 24);
    CHECK(nodes.load(2000, 24, 12) == 24);
    nodes.check_rest();
  }

  TEST_CASE("of a prompt that is longer than the part of the pool for it, the head is loaded") {
    Pair nodes;
    nodes.save_to_disk(3000, 96);

    const auto claimed = nodes.at_reader().engine->claim(numbers_from(3000, 96));
    REQUIRE(claimed);
    CHECK(claimed->blocks >= 16);
    CHECK(nodes.at_reader().load_and_check(*claimed, 3000).failed_blocks.empty());
    nodes.check_rest();
  }

  TEST_CASE("a file that is cut under the owner gives misses at the reader, and no wrong byte") {
    Pair nodes;
    nodes.save_to_disk(4000, 120);
    std::filesystem::resize_file(nodes.file, 2 << 20);

    CHECK(nodes.load(4000, 120, 12) < 120);
    nodes.check_rest();
    // Both nodes go on.
    CHECK_FALSE(nodes.at_owner().engine->save(numbers_from(9000, 12), blocks_from(0, 12)).error);
    CHECK(nodes.load(9000, 12, 12) == 12);
  }

  TEST_CASE("a disk of the owner that hangs gives misses at the reader, in time") {
    const HangingReads reads;
    Pair nodes(&reads);
    nodes.save_to_disk(5000, 12);
    reads.begin();
    const auto claimed = nodes.at_reader().engine->claim(numbers_from(5000, 12));
    REQUIRE(claimed);
    REQUIRE(claimed->blocks == 12);

    const Mover::Finished loaded = nodes.at_reader().load_and_check(*claimed, 5000);
    CHECK(loaded.failed_blocks.size() == 12);
    check_nothing_is_left(nodes.reader, std::nullopt);
    // While the disk hangs, the owner keeps the slots to which it may still write, and offers
    // nothing that is on it.
    CHECK(nodes.owner.metric_becomes("pegaflow_quarantine_slots{reason=\"fetch\"}", 12));
    CHECK(nodes.load(5000, 12, 12) == 0);
    CHECK_FALSE(nodes.at_owner().engine->save(numbers_from(9000, 12), blocks_from(0, 12)).error);
    CHECK(nodes.load(9000, 12, 12) == 12);
    // A little later it offers the disk to no one.
    const std::string slow = "pegaflow_ssd_slow{disk=\"" + nodes.file.string() + "\"}";
    CHECK(nodes.owner.metric_becomes(slow, 1));
    const auto missed = nodes.at_owner().engine->lookup(numbers_from(5000, 12));
    REQUIRE(missed);
    CHECK(missed->blocks == 0);
    CHECK(nodes.owner.metric("pegaflow_cache_miss_blocks_total{reason=\"disk_failed\"}") > 0);

    reads.end();
    CHECK(nodes.owner.metric_becomes("pegaflow_quarantine_slots{reason=\"fetch\"}", 0));
    CHECK(nodes.owner.metric_becomes(slow, 0));
    CHECK(nodes.load(5000, 12, 12) == 12);
    nodes.check_rest();
  }

  TEST_CASE("a reset while the owner reads blocks for another node drops them at both") {
    const HangingReads reads;
    Pair nodes(&reads);
    nodes.save_to_disk(6000, 12);
    reads.begin();
    const auto claimed = nodes.at_reader().engine->claim(numbers_from(6000, 12));
    REQUIRE(claimed);
    REQUIRE(claimed->blocks == 12);
    REQUIRE(nodes.owner.metric_becomes("pegaflow_ssd_reads_in_flight", 12));

    REQUIRE(nodes.at_reader().engine->session().reset_cache(kHang));
    REQUIRE(nodes.owner.metric_becomes("pegaflow_namespace_resets_total{origin=\"peer\"}", 1));
    reads.end();

    const Mover::Finished loaded = nodes.at_reader().load_and_check(*claimed, 6000);
    CHECK(loaded.failed_blocks.size() == 12);
    CHECK(nodes.load(6000, 12, 12) == 0);
    const auto found = nodes.at_owner().engine->lookup(numbers_from(6000, 12));
    REQUIRE(found);
    CHECK(found->blocks == 0);
    nodes.check_rest();
  }

  TEST_CASE("a reader that is killed ends what the owner reads for it") {
    const HangingReads reads;
    Pair nodes(&reads);
    nodes.save_to_disk(7000, 12);
    reads.begin();
    const auto claimed = nodes.at_reader().engine->claim(numbers_from(7000, 12));
    REQUIRE(claimed);
    REQUIRE(nodes.owner.metric_becomes("pegaflow_ssd_staging_bytes", 12 * 2 * kPiece));

    nodes.reader.kill();
    CHECK(nodes.owner.metric_becomes("pegaflow_ssd_staging_bytes", 0));
    CHECK(nodes.owner.metric_becomes("pegaflow_claims", 0));
    reads.end();
    check_nothing_is_left(nodes.owner, std::nullopt);
  }

  TEST_CASE("an owner that is stopped while it reads for another node is a miss there") {
    const HangingReads reads;
    Pair nodes(&reads);
    nodes.save_to_disk(8000, 96);
    reads.begin();
    const auto claimed = nodes.at_reader().engine->claim(numbers_from(8000, 12));
    REQUIRE(claimed);
    REQUIRE(claimed->blocks == 12);
    REQUIRE(nodes.owner.metric_becomes("pegaflow_ssd_staging_bytes", 12 * 2 * kPiece));

    nodes.owner.signal(SIGSTOP);
    const Mover::Finished loaded = nodes.at_reader().load_and_check(*claimed, 8000);
    CHECK(loaded.failed_blocks.size() == 12);
    CHECK(nodes.load(8000, 12, 12) == 0);
    reads.end();
    nodes.owner.signal(SIGCONT);
    // It is asked again once it has answered.
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (nodes.at_reader().engine->lookup(numbers_from(8000, 12)).value().blocks != 12) {
      REQUIRE(std::chrono::steady_clock::now() < end);
    }
    CHECK(nodes.load(8000, 96, 12) == 96);
    nodes.check_rest();
  }

  TEST_CASE("an owner that is killed while it reads for another node is a miss there") {
    const HangingReads reads;
    Pair nodes(&reads);
    nodes.save_to_disk(8000, 96);
    reads.begin();
    const auto claimed = nodes.at_reader().engine->claim(numbers_from(8000, 12));
    REQUIRE(claimed);
    REQUIRE(claimed->blocks == 12);
    REQUIRE(nodes.owner.metric_becomes("pegaflow_ssd_staging_bytes", 12 * 2 * kPiece));

    nodes.owner.kill();
    reads.end();
    const Mover::Finished loaded = nodes.at_reader().load_and_check(*claimed, 8000);
    CHECK(loaded.failed_blocks.size() == 12);
    check_nothing_is_left(nodes.reader, std::nullopt);

    // Its next process reads its disk for the node again.
    nodes.owner.start();
    REQUIRE(disk_is_ready(nodes.owner, nodes.file));
    REQUIRE(nodes.owner.metric_becomes("pegaflow_ssd_waits_for_peers", 0));
    REQUIRE(sees(nodes.reader, nodes.at[0]));
    nodes.at_owner().engine->wait_ready();
    nodes.save_to_disk(9000, 12);
    CHECK(nodes.load(9000, 12, 12) == 12);
    CHECK(nodes.owner.metric("pegaflow_ssd_staged_blocks_total") == 12);
    nodes.check_rest();
  }
}

}  // namespace
}  // namespace pegaflow::testing
