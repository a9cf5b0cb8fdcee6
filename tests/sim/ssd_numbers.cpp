// The order in which a disk of the SSD tier records names, the tables that use their numbers, the
// headers of segments and the superblocks, and what a scan finds while the queue of the disk is
// full.
#include <chrono>
#include <functional>
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
  /// Executes what is due in that time.
  void run_for(Duration time) {
    const TimePoint until = clock.now() + time;
    while (drive.next_time() <= until) advance();
    clock.advance(until - clock.now());
  }
  void power_cut_and_start() {
    drive.power_cut();
    disk.reset();
    start();
  }
  /// Writes block 2 of the name 1 to a new segment, whose header hangs.
  void write_with_hung_header() {
    write(1, 1);
    run_until_idle();
    disk->poll();
    run_until_idle();
    kill_and_start();
    // Beside a read that hangs one write begins every 100 ms: the header before the block.
    drive.set_faults({.hang = 1});
    SsdDisk::Block read{.origin = origin_of(1), .key = key_of(1)};
    read.add(read_memory.bytes(), 0, kBlockBytes);
    REQUIRE(disk->read(read, [](SsdDisk::Loaded&&) {}));
    bool is_kept = false;
    SsdDisk::Block block{.origin = origin_of(1), .key = key_of(2)};
    block.add(memory.bytes(), 0, kBlockBytes);
    REQUIRE(disk->write(block, {}, [&](SsdDisk::Written written) {
      is_kept = written == SsdDisk::Written::kKept;
    }));
    run_for(std::chrono::milliseconds(150));
    drive.set_faults({});
    run_for(std::chrono::milliseconds(100));
    REQUIRE(is_kept);
    REQUIRE(drive.counts().in_flight == 2);
  }
  /// The superblocks of this drop hang. `done` as for SsdDisk::drop_all().
  void drop_and_hang(std::function<void(bool)> done) {
    run_until_idle();
    drive.set_faults({.hang = 1});
    disk->drop_all(std::move(done));
    run_for(std::chrono::milliseconds(10));
    drive.set_faults({});
    REQUIRE(drive.counts().in_flight == 2);
  }
  [[nodiscard]] Result<ssd::Superblock> superblock(std::uint64_t offset) const {
    AlignedBuffer page(ssd::kSector);
    drive.peek(offset, page.bytes());
    return ssd::decode_superblock(page.bytes().first<ssd::kSector>());
  }
  [[nodiscard]] bool has(std::uint8_t name, std::uint8_t key) const {
    return disk->has(origin_of(name).name, {}, key_of(key));
  }

  ManualClock clock;
  SimDrive drive;
  AlignedBuffer memory{kBlockBytes};
  AlignedBuffer read_memory{kBlockBytes};
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

  TEST_CASE("a header that is written late does not replace that of the next life") {
    set_log_level(LogLevel::kOff);
    Machine machine;
    machine.write_with_hung_header();
    machine.disk->poll();
    machine.run_for(std::chrono::milliseconds(200));
    bool is_dropped = false;
    machine.disk->drop_all([&](bool is_durable) { is_dropped = is_durable; });
    machine.run_for(std::chrono::milliseconds(200));
    REQUIRE(is_dropped);

    machine.write(1, 3);
    machine.drive.release_hung();
    machine.run_until_idle();
    machine.disk->sync([] {});
    machine.run_until_idle();
    machine.power_cut_and_start();

    CHECK(machine.has(1, 3));
    CHECK_FALSE(machine.has(1, 2));
  }

  TEST_CASE("a sync ends only once the header of a segment is written") {
    set_log_level(LogLevel::kOff);
    Machine machine;
    machine.write_with_hung_header();
    bool is_synced = false;
    machine.disk->sync([&] { is_synced = true; });
    machine.run_for(std::chrono::seconds(1));
    CHECK_FALSE(is_synced);

    machine.drive.release_hung();
    machine.run_until_idle();

    REQUIRE(is_synced);
    machine.power_cut_and_start();
    CHECK(machine.has(1, 2));
  }

  TEST_CASE("a superblock that is written late does not replace that of a later drop") {
    set_log_level(LogLevel::kOff);
    Machine machine;
    machine.write(1, 1);
    std::string ended;
    machine.drop_and_hang([&](bool is_durable) { ended += is_durable ? "1 " : "1 failed "; });
    machine.write(1, 2);
    bool is_synced = false;
    machine.disk->sync([&] { is_synced = true; });
    machine.run_for(std::chrono::milliseconds(100));
    REQUIRE(is_synced);
    machine.disk->drop_all([&](bool is_durable) { ended += is_durable ? "2 " : "2 failed "; });
    machine.run_for(std::chrono::milliseconds(100));
    CHECK(ended == "");

    machine.drive.release_hung();
    machine.run_until_idle();
    CHECK(ended == "1 2 ");
    machine.power_cut_and_start();

    CHECK_FALSE(machine.has(1, 1));
    CHECK_FALSE(machine.has(1, 2));
  }

  TEST_CASE("a drop is reported once its own superblocks are durable, or cannot be written") {
    set_log_level(LogLevel::kOff);
    Machine machine;
    std::string ended;
    const auto note = [&](const std::string& which) {
      return [&ended, which](bool is_durable) { ended += which + (is_durable ? " " : " failed "); };
    };
    machine.drop_and_hang(note("1"));
    machine.disk->drop_all(note("2"));
    machine.disk->drop_all(note("3"));
    const std::uint64_t pieces = machine.drive.counts().pieces;

    machine.drive.release_hung();
    while (ended.empty()) machine.advance();
    CHECK(ended == "1 ");
    machine.drive.set_faults({.write_error = 1});
    machine.run_until_idle();
    CHECK(ended == "1 2 failed 3 failed ");
    // Two copies for the first drop, and two for both others.
    CHECK(machine.drive.counts().pieces - pieces == 4);

    machine.drive.set_faults({});
    machine.disk->drop_all(note("4"));
    machine.run_until_idle();
    CHECK(ended == "1 2 failed 3 failed 4 ");
  }

  TEST_CASE("a drop that waits when the disk is closed is reported as failed") {
    set_log_level(LogLevel::kOff);
    Machine machine;
    std::string ended;
    machine.drop_and_hang([&](bool is_durable) { ended += is_durable ? "1 " : "1 failed "; });
    machine.disk->drop_all([&](bool is_durable) { ended += is_durable ? "2 " : "2 failed "; });

    machine.disk.reset();

    CHECK(ended == "1 failed 2 failed ");
  }

  TEST_CASE("a superblock that is written late does not revive a disk that was left") {
    set_log_level(LogLevel::kOff);
    Machine machine;
    machine.write(1, 1);
    bool is_dropped = false;
    machine.drop_and_hang([&](bool is_durable) { is_dropped = is_durable; });
    machine.drive.set_faults({.write_error = 1});
    bool is_recorded = true;
    machine.disk->reset(origin_of(1).name, {.counter = 1, .id = 1},
                        [&](bool is_durable) { is_recorded = is_durable; });
    while (machine.disk->state() != SsdDisk::State::kLeft) machine.advance();
    CHECK_FALSE(is_recorded);
    machine.drive.set_faults({});
    machine.run_for(std::chrono::milliseconds(100));
    // At once, since what hangs may never end.
    for (const std::uint64_t offset : ssd::kSuperblockOffsets) {
      CHECK_FALSE(machine.superblock(offset));
    }
    CHECK_FALSE(is_dropped);

    machine.drive.release_hung();
    machine.run_until_idle();
    CHECK(is_dropped);
    machine.drive.power_cut();

    for (const std::uint64_t offset : ssd::kSuperblockOffsets) {
      const auto found = machine.superblock(offset);
      REQUIRE_FALSE(found);
      CHECK(found.error().code == Errc::kRefused);
    }
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
