// A disk of the SSD tier that becomes slow, and one whose index has a limit, in virtual time.
#include <cstring>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "server/ssd/ssd_disk.h"
#include "transport/disk/sim_disk.h"

namespace pegaflow::server {
namespace {

namespace ssd = engine::ssd;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::uint64_t kBlockBytes = 16 << 10;

BlockKey key_of(std::uint64_t number) {
  BlockKey key;
  const std::uint64_t hashed = (number + 1) * 0x9E3779B97F4A7C15ULL;
  std::memcpy(key.bytes.data(), &hashed, sizeof hashed);
  return key;
}

/// One disk over a simulated drive of 64 MiB.
struct SlowDisk {
  explicit SlowDisk(std::uint64_t limit = 0) : index_bytes(limit) { start(); }

  void start() {
    auto opened = drive.open({}, [this](Disk::Completion&& completion) {
      if (disk) disk->completed(std::move(completion));
    });
    REQUIRE(opened);
    SsdDisk::Options options;
    options.size_bytes = kSize;
    options.segment_bytes = ssd::kLeastSegment;
    options.index_bytes = index_bytes;
    disk = std::make_unique<SsdDisk>(std::move(*opened), options, clock);
    REQUIRE(disk->open([this] { advance(); }));
    disk->start_scan();
    run_until_idle();
    REQUIRE(disk->state() == SsdDisk::State::kReady);
  }
  void restart() {
    disk->sync([] {});
    run_until_idle();
    disk.reset();
    start();
  }
  void advance() {
    const TimePoint next = drive.next_time();
    if (next != TimePoint::max() && next > clock.now()) clock.advance(next - clock.now());
    drive.run();
  }
  void run_until_idle() {
    while (drive.next_time() != TimePoint::max()) advance();
  }
  /// The server's tick, so many times. What is due meanwhile is executed.
  void tick(int times) {
    for (int i = 0; i < times; ++i) {
      const TimePoint until = clock.now() + seconds(1);
      while (drive.next_time() <= until) advance();
      if (clock.now() < until) clock.advance(until - clock.now());
      disk->poll();
    }
  }
  [[nodiscard]] SsdDisk::Block block(std::uint64_t number) {
    SsdDisk::Block block{.origin = origin, .key = key_of(number)};
    block.memory.push_back(memory.bytes());
    block.page_bytes.push_back(kBlockBytes);
    return block;
  }
  void save(std::uint64_t first, std::size_t count) {
    for (std::uint64_t number = first; number < first + count; ++number) {
      REQUIRE(disk->write(block(number), {}, [](SsdDisk::Written written) {
        CHECK(written == SsdDisk::Written::kKept);
      }));
      run_until_idle();
    }
  }
  [[nodiscard]] bool has(std::uint64_t number) const {
    return disk->has(origin.name, origin.epoch, key_of(number));
  }
  /// Begins to read a block; false when it is not offered.
  bool read(std::uint64_t number) {
    return disk->read(block(number),
                      [this](SsdDisk::Loaded&& loaded) { loaded_blocks += loaded.proven ? 1 : 0; });
  }
  void set_latency(Duration latency) { drive.set_speed({.latency = latency}); }

  static constexpr std::uint64_t kSize = std::uint64_t{64} << 20;
  std::uint64_t index_bytes;
  ManualClock clock;
  SimDrive drive{clock, 1, kSize};
  AlignedBuffer memory{kBlockBytes};
  ssd::Origin origin{};
  std::unique_ptr<SsdDisk> disk;
  std::size_t loaded_blocks = 0;
};

}  // namespace

TEST_SUITE("a disk that becomes slow") {
  TEST_CASE("reads that take far longer than usual end its use, and fast probes begin it again") {
    SlowDisk slow;
    slow.save(0, 20);
    for (int i = 0; i < 20; ++i) {
      CHECK(slow.read(i));
      slow.run_until_idle();
    }
    CHECK(slow.loaded_blocks == 20);
    CHECK_FALSE(slow.disk->stats().is_slow);

    slow.set_latency(milliseconds(1500));
    int reads = 0;
    while (slow.read(reads % 20) && reads < 100) {
      ++reads;
      slow.run_until_idle();
    }

    CHECK(reads == 4);
    CHECK(slow.disk->stats().is_slow);
    CHECK_FALSE(slow.has(0));
    CHECK(slow.disk->hides(slow.origin.name, slow.origin.epoch, key_of(0)));
    CHECK_FALSE(slow.disk->takes_blocks());

    slow.tick(60);
    CHECK(slow.disk->stats().is_slow);

    slow.set_latency(milliseconds(1));
    slow.tick(20);
    CHECK_FALSE(slow.disk->stats().is_slow);
    CHECK_FALSE(slow.disk->hides(slow.origin.name, slow.origin.epoch, key_of(0)));
    CHECK(slow.read(0));
    slow.run_until_idle();
    CHECK(slow.disk->takes_blocks());
  }

  TEST_CASE("a read that hangs ends its use within seconds") {
    SlowDisk slow;
    slow.save(0, 2);
    slow.drive.set_faults({.hang = 1});
    CHECK(slow.read(0));
    slow.tick(1);
    CHECK(slow.has(1));
    slow.tick(3);
    CHECK_FALSE(slow.has(1));

    slow.drive.set_faults({});
    slow.drive.release_hung();
    slow.tick(20);

    CHECK(slow.has(1));
    CHECK(slow.loaded_blocks == 1);
  }

  TEST_CASE("a pause that makes all reads in flight slow is of no consequence") {
    SlowDisk slow;
    slow.save(0, 20);
    slow.set_latency(milliseconds(1500));
    for (int i = 0; i < 20; ++i) CHECK(slow.read(i));
    slow.run_until_idle();
    slow.set_latency(milliseconds(1));

    CHECK_FALSE(slow.disk->stats().is_slow);
    CHECK(slow.has(0));
  }

  TEST_CASE("a few slow reads between others are of no consequence") {
    SlowDisk slow;
    slow.save(0, 2);
    for (int i = 0; i < 200; ++i) {
      slow.set_latency(i % 3 == 0 ? seconds(2) : milliseconds(1));
      CHECK(slow.read(i % 2));
      slow.run_until_idle();
      slow.disk->poll();
    }

    CHECK_FALSE(slow.disk->stats().is_slow);
  }

  TEST_CASE("reads behind many bytes may take longer") {
    SlowDisk slow;
    slow.save(0, 20);
    slow.drive.set_speed({.latency = milliseconds(1), .bytes_per_second = 20e6});
    for (int round = 0; round < 20; ++round) {
      for (int i = 0; i < 20; ++i) CHECK(slow.read(i));
      slow.run_until_idle();
      slow.disk->poll();
    }

    CHECK_FALSE(slow.disk->stats().is_slow);
  }
}

TEST_SUITE("the memory of a disk's index") {
  // A segment of 1 MiB has at most 63 entries.
  constexpr std::uint64_t kIndexBytes = std::uint64_t{46} * 63 * 10;

  TEST_CASE("a limit that is too small for two segments is refused with what is needed") {
    ManualClock clock;
    SimDrive drive(clock, 1, SlowDisk::kSize);
    std::unique_ptr<SsdDisk> disk;
    auto opened = drive.open(
        {}, [&](Disk::Completion&& completion) { disk->completed(std::move(completion)); });
    REQUIRE(opened);
    SsdDisk::Options options;
    options.size_bytes = SlowDisk::kSize;
    options.segment_bytes = ssd::kLeastSegment;
    options.index_bytes = 1000;
    disk = std::make_unique<SsdDisk>(std::move(*opened), options, clock);

    const auto result = disk->open([&] {
      const TimePoint next = drive.next_time();
      if (next != TimePoint::max() && next > clock.now()) clock.advance(next - clock.now());
      drive.run();
    });

    REQUIRE_FALSE(result);
    CHECK(result.error().code == Errc::kInvalidArgument);
    CHECK(result.error().detail.find("--ssd-index-memory") != std::string::npos);
  }

  TEST_CASE("the oldest blocks are dropped before the disk is full, also after a restart") {
    SlowDisk small(kIndexBytes);
    small.save(0, 3000);

    CHECK(small.disk->stats().blocks <= 630);
    CHECK(small.disk->stats().blocks >= 500);
    CHECK(small.disk->stats().index_bytes <= 2 * kIndexBytes);
    CHECK(small.disk->stats().reclaimed_blocks >= 2370);
    CHECK(small.has(2999));
    CHECK_FALSE(small.has(1000));
    CHECK(small.disk->check());

    small.restart();

    CHECK(small.disk->stats().blocks <= 630);
    CHECK(small.has(2999));
    CHECK(small.disk->check());
  }

  TEST_CASE("a smaller limit at a later start keeps the newest blocks") {
    SlowDisk disk;
    disk.save(0, 3000);
    CHECK(disk.disk->stats().blocks == 3000);
    disk.index_bytes = kIndexBytes;

    disk.restart();

    CHECK(disk.disk->stats().blocks <= 630);
    CHECK(disk.has(2999));
    CHECK_FALSE(disk.has(0));
  }
}

}  // namespace pegaflow::server
