// The simulated disk: what it loses, damages and delays, and when its lock is free.
#include "transport/disk/sim_disk.h"

#include <cerrno>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/disk_inbox.h"
#include "tests/support/seed.h"

namespace pegaflow::testing {
namespace {

using Operation = Disk::Operation;

constexpr std::uint64_t kPage = Disk::kAlignment;
constexpr std::uint64_t kPages = 256;

/// A drive, the disk on it, and time.
struct Bench {
  explicit Bench(std::uint64_t from = seed())
      : random(from),
        drive(clock, from, kPages * kPage),
        disk(drive.open({}, inbox.sink()).value()) {}

  /// Advances time until nothing is due.
  void settle() {
    for (TimePoint next = drive.next_time(); next != TimePoint::max(); next = drive.next_time()) {
      clock.advance(std::max(next - clock.now(), Duration::zero()));
      drive.run();
    }
  }
  std::uint64_t submit(Operation operation, std::uint64_t page, std::span<std::byte> memory) {
    Disk::Request request{.ticket = ++tickets, .operation = operation, .offset = page * kPage};
    if (!memory.empty()) request.memory = {memory};
    REQUIRE(disk->submit(std::move(request)));
    return tickets;
  }
  Disk::Completion execute(Operation operation, std::uint64_t page, std::span<std::byte> memory) {
    const std::uint64_t ticket = submit(operation, page, memory);
    settle();
    REQUIRE(inbox.has(ticket));
    return inbox.take(ticket);
  }
  /// Writes pages that begin with their number and `version`.
  Disk::Completion write(std::uint64_t page, std::uint64_t count, unsigned version,
                         Operation operation = Operation::kWrite) {
    const AlignedMemory memory(count * kPage);
    for (std::uint64_t i = 0; i < count; ++i) {
      std::fill_n(memory.part(i * kPage, kPage).begin(), kPage,
                  std::byte(version * 16 + (page + i) % 16));
    }
    return execute(operation, page, memory.span());
  }
  /// The version of a page; nothing if its bytes are not of one version of this page.
  std::optional<unsigned> version(std::uint64_t page) {
    std::vector<std::byte> bytes(kPage);
    drive.peek(page * kPage, bytes);
    const auto first = std::to_integer<unsigned>(bytes[0]);
    for (const std::byte byte : bytes) {
      if (std::to_integer<unsigned>(byte) != first) return std::nullopt;
    }
    if (first == 0) return 0;
    if (first % 16 != page % 16) return std::nullopt;
    return first / 16;
  }
  void reopen() {
    disk.reset();
    disk = drive.open({}, inbox.sink()).value();
  }

  std::mt19937_64 random;
  ManualClock clock;
  SimDrive drive;
  DiskInbox inbox;
  std::unique_ptr<Disk> disk;
  std::uint64_t tickets = 0;
};

TEST_SUITE("SimDrive") {
  TEST_CASE("a power cut keeps what was flushed or written durably, and any part of the rest") {
    std::uint64_t lost = 0;
    std::uint64_t kept = 0;
    for (std::uint64_t round = 0; round < 20; ++round) {
      Bench bench(seed() + round);
      REQUIRE_FALSE(bench.write(0, 32, 1).error);
      REQUIRE_FALSE(bench.execute(Operation::kFlush, 0, {}).error);
      REQUIRE_FALSE(bench.write(0, 16, 2).error);
      REQUIRE_FALSE(bench.write(32, 8, 3, Operation::kDurableWrite).error);

      bench.drive.power_cut();

      CHECK_FALSE(bench.drive.is_locked());
      for (std::uint64_t page = 0; page < 16; ++page) {
        REQUIRE((bench.version(page) == 1 || bench.version(page) == 2));
        ++(bench.version(page) == 1 ? lost : kept);
      }
      for (std::uint64_t page = 16; page < 32; ++page) REQUIRE(bench.version(page) == 1);
      for (std::uint64_t page = 32; page < 40; ++page) REQUIRE(bench.version(page) == 3);
      const AlignedMemory memory(kPage);
      const Result<void> later = bench.disk->submit({.ticket = 1, .memory = {memory.span()}});
      CHECK(later.error().code == Errc::kGone);
      bench.reopen();
      CHECK_FALSE(bench.write(0, 1, 4).error);
    }
    CHECK(lost > 0);
    CHECK(kept > 0);
  }

  TEST_CASE("a flush does not cover a write that ends after its begin") {
    bool lost = false;
    for (std::uint64_t round = 0; round < 50 && !lost; ++round) {
      Bench bench(seed() + round);
      const AlignedMemory memory(kPage);
      std::fill(memory.span().begin(), memory.span().end(), std::byte{16});
      bench.submit(Operation::kFlush, 0, {});
      bench.submit(Operation::kWrite, 0, memory.span());
      bench.settle();
      bench.drive.power_cut();
      lost = bench.version(0) == 0;
    }
    CHECK(lost);
  }

  TEST_CASE("a power cut tears writes in flight by sector, and touches no memory afterwards") {
    bool torn = false;
    for (std::uint64_t round = 0; round < 50; ++round) {
      Bench bench(seed() + round);
      const AlignedMemory memory(64 * kPage);
      for (std::uint64_t page = 0; page < 64; ++page) {
        std::fill_n(memory.part(page * kPage, kPage).begin(), kPage, std::byte(16 + page % 16));
      }
      const AlignedMemory target(64 * kPage);
      bench.submit(Operation::kWrite, 0, memory.span());
      bench.submit(Operation::kRead, 64, target.span());
      bench.drive.run();
      CHECK(bench.drive.counts().in_flight == 1);  // The write waits for the read.
      bench.clock.advance(std::chrono::milliseconds(150));
      bench.submit(Operation::kFlush, 0, {});

      bench.drive.power_cut();
      const std::vector<std::byte> before(target.span().begin(), target.span().end());
      bench.settle();

      CHECK(std::equal(before.begin(), before.end(), target.span().begin()));
      std::set<std::optional<unsigned>> versions;
      for (std::uint64_t page = 0; page < 64; ++page) {
        REQUIRE(bench.version(page));
        versions.insert(bench.version(page));
      }
      torn = torn || versions.size() == 2;
      CHECK(bench.inbox.order().empty());
    }
    CHECK_FALSE(torn);  // Nothing of the write had begun.

    for (std::uint64_t round = 0; round < 20; ++round) {
      Bench bench(seed() + round);
      const AlignedMemory memory(64 * kPage);
      std::fill(memory.span().begin(), memory.span().end(), std::byte{16});
      bench.submit(Operation::kWrite, 0, memory.span());
      bench.drive.run();
      REQUIRE(bench.drive.counts().in_flight == 1);
      bench.drive.power_cut();
      std::set<std::byte> first;
      for (std::uint64_t page = 0; page < 64; ++page) {
        std::vector<std::byte> bytes(kPage);
        bench.drive.peek(page * kPage, bytes);
        first.insert(bytes[0]);
      }
      torn = torn || first.size() == 2;
    }
    CHECK(torn);
  }

  TEST_CASE("I/O of a killed process goes on in its memory, and holds the lock to its end") {
    Bench bench;
    REQUIRE_FALSE(bench.write(0, 64, 5).error);
    const std::size_t before = bench.inbox.order().size();
    const AlignedMemory target(64 * kPage);
    bench.submit(Operation::kRead, 0, target.span());
    bench.drive.run();

    bench.drive.kill();

    CHECK(bench.drive.is_locked());
    DiskInbox other;
    CHECK(bench.drive.open({}, other.sink()).error().code == Errc::kBusy);
    CHECK(target.span()[1] == std::byte{0});
    bench.settle();
    CHECK(target.span()[1] == std::byte{5 * 16});
    CHECK_FALSE(bench.drive.is_locked());
    CHECK(bench.inbox.order().size() == before);  // Nothing is delivered to the dead.
    CHECK(bench.drive.open({}, other.sink()));
  }

  TEST_CASE("a hung read keeps its memory and its bytes in flight until it is released") {
    Bench bench;
    REQUIRE_FALSE(bench.write(0, 1, 3).error);
    bench.drive.set_faults({.hang = 1});
    const AlignedMemory memory(kPage);
    const std::uint64_t ticket = bench.submit(Operation::kRead, 0, memory.span());
    bench.settle();
    bench.drive.set_faults({});
    CHECK(bench.disk->cancel(ticket));
    bench.clock.advance(std::chrono::hours(1));
    bench.settle();

    CHECK_FALSE(bench.inbox.has(ticket));
    CHECK(bench.disk->stats().reads.bytes_in_flight == kPage);
    CHECK_FALSE(bench.write(1, 8, 1).error);  // Slowly, as the reads hang.
    bench.drive.release_hung();
    bench.settle();

    CHECK_FALSE(bench.inbox.take(ticket).error);
    CHECK(memory.span()[0] == std::byte{3 * 16});
    CHECK(bench.disk->stats().reads.bytes_in_flight == 0);
  }

  TEST_CASE("a clean stop ends hung I/O too") {
    Bench bench;
    bench.drive.set_faults({.hang = 1});
    const AlignedMemory memory(kPage);
    const std::uint64_t ticket = bench.submit(Operation::kRead, 0, memory.span());
    bench.drive.run();

    bench.disk.reset();

    CHECK(bench.inbox.has(ticket));
    CHECK_FALSE(bench.drive.is_locked());
  }

  TEST_CASE("each fault shows as the header describes it") {
    struct Row {
      const char* name;
      SimDrive::Faults faults;
      Operation operation;
      int error_number;  ///< -1: success.
      bool changes_bytes;
    };
    const std::vector<Row> rows = {
        {"read error", {.read_error = 1}, Operation::kRead, EIO, true},
        {"write error", {.write_error = 1}, Operation::kWrite, EIO, true},
        {"no space", {.no_space = 1}, Operation::kWrite, ENOSPC, true},
        {"torn write", {.torn_write = 1}, Operation::kWrite, -1, true},
        {"lost write", {.lost_write = 1}, Operation::kWrite, -1, true},
        {"misdirected write", {.misdirected_write = 1}, Operation::kWrite, -1, true},
        {"misdirected read", {.misdirected_read = 1}, Operation::kRead, -1, true},
        {"flip", {.read_flip = 1}, Operation::kRead, -1, true},
        {"rot", {.rot = 1}, Operation::kRead, -1, true},
        {"short read", {.short_transfer = 1}, Operation::kRead, 0, true},
        {"short write", {.short_transfer = 1}, Operation::kWrite, 0, true},
        {"slow", {.slow = 1}, Operation::kRead, -1, false},
        {"flush error", {.flush_error = 1}, Operation::kFlush, EIO, false},
    };
    for (const Row& row : rows) {
      CAPTURE(row.name);
      Bench bench;
      REQUIRE_FALSE(bench.write(0, 128, 1).error);
      REQUIRE_FALSE(bench.write(128, 64, 2).error);
      bench.drive.set_faults(row.faults);
      const AlignedMemory memory(64 * kPage);
      for (std::uint64_t page = 0; page < 64; ++page) {
        std::fill_n(memory.part(page * kPage, kPage).begin(), kPage, std::byte(112 + page % 16));
      }

      const Disk::Completion completion = bench.execute(
          row.operation, 128,
          row.operation == Operation::kFlush ? std::span<std::byte>() : memory.span());

      CHECK(completion.error.has_value() == (row.error_number >= 0));
      CHECK(completion.error_number == std::max(row.error_number, 0));
      bench.drive.set_faults({});
      std::uint64_t right = 0;
      for (std::uint64_t page = 0; page < 64; ++page) {
        if (row.operation == Operation::kWrite) {
          right += bench.version(128 + page) == 7 ? 1 : 0;
        } else {
          const auto part = memory.part(page * kPage, kPage);
          const auto wrong = std::find_if(part.begin(), part.end(), [&](std::byte byte) {
            return byte != std::byte(32 + page % 16);
          });
          right += wrong == part.end() ? 1 : 0;
        }
      }
      if (row.changes_bytes) CHECK(right < 64);
      if (row.error_number == -1 && !row.changes_bytes) CHECK(right == 64);
      CHECK(bench.drive.counts().faults <= 1);
    }
  }

  TEST_CASE("a bad sector fails reads over it until it is written") {
    Bench bench;
    const AlignedMemory memory(4 * kPage);
    bench.drive.set_bad_sector(5 * kPage);
    CHECK(bench.execute(Operation::kRead, 4, memory.span()).error_number == EIO);
    CHECK(bench.execute(Operation::kRead, 4, memory.span()).error_number == EIO);
    CHECK_FALSE(bench.execute(Operation::kRead, 6, memory.span()).error);

    REQUIRE_FALSE(bench.execute(Operation::kWrite, 5, memory.part(0, kPage)).error);

    CHECK_FALSE(bench.execute(Operation::kRead, 4, memory.span()).error);
  }

  TEST_CASE("a device that is gone fails everything, and comes back without its cache") {
    Bench bench;
    REQUIRE_FALSE(bench.write(0, 4, 1).error);
    REQUIRE_FALSE(bench.execute(Operation::kFlush, 0, {}).error);
    REQUIRE_FALSE(bench.write(0, 4, 2).error);
    const AlignedMemory memory(kPage);

    bench.drive.set_gone(true);

    CHECK(bench.execute(Operation::kRead, 0, memory.span()).error_number == ENODEV);
    CHECK(bench.execute(Operation::kWrite, 0, memory.span()).error_number == ENODEV);
    CHECK(bench.execute(Operation::kFlush, 0, {}).error_number == ENODEV);
    bench.drive.set_gone(false);
    for (std::uint64_t page = 0; page < 4; ++page) CHECK(bench.version(page) == 1);
    CHECK_FALSE(bench.execute(Operation::kRead, 0, memory.span()).error);
  }

  TEST_CASE("bits flipped and pages written by a test are what a reader gets") {
    Bench bench;
    REQUIRE_FALSE(bench.write(0, 1, 1).error);
    bench.drive.flip_bit(7, 3);
    bench.drive.flip_bit(9 * kPage, 0);
    const std::vector<std::byte> page(kPage, std::byte{77});
    bench.drive.poke(kPage, page);
    const AlignedMemory memory(2 * kPage);

    REQUIRE_FALSE(bench.execute(Operation::kRead, 0, memory.span()).error);

    CHECK(memory.span()[6] == std::byte{16});
    CHECK(memory.span()[7] == std::byte{16 ^ 8});
    CHECK(memory.span()[kPage] == std::byte{77});
    REQUIRE_FALSE(bench.execute(Operation::kRead, 9, memory.part(0, kPage)).error);
    CHECK(memory.span()[0] == std::byte{1});
    bench.drive.power_cut();
    CHECK(std::equal(page.begin(), page.end(), [&] {
      bench.drive.peek(kPage, memory.part(0, kPage));
      return memory.span().begin();
    }()));
  }

  TEST_CASE("a seed yields one sequence of events, and another seed another one") {
    const auto run = [](std::uint64_t from) {
      Bench bench(from);
      bench.drive.set_faults({.read_error = 0.1,
                              .write_error = 0.1,
                              .torn_write = 0.1,
                              .misdirected_read = 0.1,
                              .slow = 0.2});
      const AlignedMemory memory(kPages * kPage);
      std::string log;
      for (int i = 0; i < 300; ++i) {
        const std::uint64_t page = bench.random() % (kPages - 8);
        bench.submit(bench.random() % 2 == 0 ? Operation::kRead : Operation::kWrite, page,
                     memory.part(page * kPage, (1 + bench.random() % 8) * kPage));
      }
      bench.settle();
      for (const std::uint64_t ticket : bench.inbox.order()) {
        const Disk::Completion completion = bench.inbox.take(ticket);
        log +=
            fmt::format("{}:{}:{} ", ticket, completion.error_number, completion.service.count());
      }
      return log;
    };
    CHECK(run(seed()) == run(seed()));
    CHECK(run(seed()) != run(seed() + 1));
  }
}

}  // namespace
}  // namespace pegaflow::testing
