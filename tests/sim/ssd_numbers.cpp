// The order in which a disk of the SSD tier records names and the tables that use their numbers,
// and what a scan finds while the queue of the disk is full.
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include <doctest/doctest.h>

#include "base/clock.h"
#include "base/log.h"
#include "server/ssd/ssd_disk.h"
#include "tests/support/seed.h"
#include "transport/disk/sim_disk.h"

namespace pegaflow::server {
namespace {

namespace ssd = engine::ssd;

constexpr std::uint64_t kSize = ssd::kLogOffset + 4 * ssd::kLeastSegment;
constexpr std::uint64_t kBlockBytes = 8192;

ssd::Origin origin_of(std::uint8_t number) {
  ssd::Origin origin;
  origin.name[0] = std::byte{number};
  return origin;
}

BlockKey key_of(std::uint8_t number) {
  BlockKey key;
  key.bytes[0] = std::byte{number};
  return key;
}

/// A simulated drive, and the process that uses it.
struct Machine {
  Machine() : drive(clock, testing::seed(), kSize) { start(); }

  void start(const Disk::Limits& limits = {}) {
    auto opened = drive.open(limits, [this](Disk::Completion&& completion) {
      if (disk) disk->completed(std::move(completion));
    });
    REQUIRE(opened);
    SsdDisk::Options options;
    options.size_bytes = kSize;
    options.segment_bytes = ssd::kLeastSegment;
    options.table_delay = Duration::zero();
    disk = std::make_unique<SsdDisk>(std::move(*opened), options, clock);
    REQUIRE(disk->open([this] { advance(); }));
    disk->start_scan();
    run_until_idle();
    REQUIRE(disk->state() == SsdDisk::State::kReady);
  }
  void kill_and_start(const Disk::Limits& limits = {}) {
    drive.kill();
    while (drive.is_locked()) advance();
    disk.reset();
    start(limits);
  }
  void advance() {
    const TimePoint next = drive.next_time();
    if (next != TimePoint::max() && next > clock.now()) clock.advance(next - clock.now());
    drive.run();
  }
  void run_until_idle() {
    while (drive.next_time() != TimePoint::max()) advance();
  }
  /// Returns when the block is on the disk; its table and its name need not be.
  void write(std::uint8_t name, std::uint8_t key) {
    SsdDisk::Block block{.origin = origin_of(name), .key = key_of(key)};
    block.add(memory.bytes(), 0, kBlockBytes);
    bool is_kept = false;
    REQUIRE(disk->write(block, {}, [&](SsdDisk::Written written) {
      is_kept = written == SsdDisk::Written::kKept;
    }));
    while (!is_kept) advance();
  }
  [[nodiscard]] bool has(std::uint8_t name, std::uint8_t key) const {
    return disk->has(origin_of(name).name, {}, key_of(key));
  }

  ManualClock clock;
  SimDrive drive;
  AlignedBuffer memory{kBlockBytes};
  std::unique_ptr<SsdDisk> disk;
};

}  // namespace

TEST_SUITE("a simulated SSD") {
  TEST_CASE("a scan whose reads find the queue of the disk full finds all blocks") {
    set_log_level(LogLevel::kOff);
    constexpr std::uint8_t kBlocks = 250;  // In two of the four segments.
    Machine machine;
    for (std::uint8_t key = 0; key < kBlocks; ++key) machine.write(1, key);
    machine.run_until_idle();
    machine.disk->poll();
    machine.run_until_idle();

    machine.kill_and_start({.requests = 1});

    CHECK(machine.disk->stats().recovered_blocks == kBlocks);
    for (std::uint8_t key = 0; key < kBlocks; ++key) CHECK(machine.has(1, key));
  }

  TEST_CASE("a number of a name whose record was lost in a kill finds no block of another name") {
    set_log_level(LogLevel::kOff);
    // Each count of events after which the process is killed: between any two I/Os.
    constexpr int kMostEvents = 120;
    int found = 0;
    for (int events = 0; events < kMostEvents; ++events) {
      Machine machine;
      machine.write(1, 1);
      machine.write(2, 2);
      for (int i = 0; i < events; ++i) {
        machine.disk->poll();
        machine.advance();
      }
      machine.kill_and_start();
      INFO("after ", events, " events");
      const bool was_found = machine.has(2, 2);
      found += was_found ? 1 : 0;

      machine.write(3, 3);
      machine.run_until_idle();  // The names are written, and then the tables.
      machine.disk->poll();
      machine.run_until_idle();
      machine.kill_and_start();

      CHECK_FALSE(machine.has(3, 2));
      CHECK(machine.has(3, 3));
      CHECK(machine.has(2, 2) == was_found);
    }
    // The last ends come after all has been recorded.
    CHECK(found > 0);
    CHECK(found < kMostEvents);
  }
}

}  // namespace pegaflow::server
