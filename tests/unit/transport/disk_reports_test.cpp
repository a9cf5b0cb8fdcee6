// Reads that a disk reports together: DiskOptions::report_interval.
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "harness/child.h"
#include "tests/support/disk_inbox.h"
#include "transport/disk/open_disk.h"

namespace pegaflow::testing {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kBlock = kMiB / 8;  // Half of a quarter of the bytes in flight.
constexpr std::uint64_t kBlocks = 8;

/// A disk on threads, and how many reads it had reported when the hook of each one ran.
struct Fixture {
  explicit Fixture(Duration interval) {
    auto opened = open_disk({.path = directory.path(),
                             .size_bytes = kBlocks * kBlock,
                             .backend = DiskBackend::kThreads,
                             .limits = {.read_bytes = kMiB},
                             .report_interval = interval},
                            inbox.sink());
    REQUIRE(opened);
    disk = std::move(*opened);
  }

  Disk::Request read(std::uint64_t ticket, const std::optional<Error>& failure = std::nullopt) {
    const std::uint64_t at = ticket % kBlocks * kBlock;
    return {.ticket = ticket,
            .offset = at,
            .memory = {memory.part(at, kBlock)},
            .hook = [this, failure](Disk::Completion&) -> Result<void> {
              reported.push_back(inbox.order().size());
              if (failure) return tl::unexpected<Error>(*failure);
              return {};
            }};
  }
  /// All of them are in flight before the first one ends.
  void read_together(std::uint64_t first, std::uint64_t count) {
    std::vector<Disk::Request> requests;
    for (std::uint64_t i = 0; i < count; ++i) requests.push_back(read(first + i));
    REQUIRE(disk->submit(std::move(requests)));
    for (std::uint64_t i = 0; i < count; ++i) CHECK_FALSE(inbox.take(first + i).error);
  }

  harness::TemporaryDirectory directory = harness::TemporaryDirectory::create().value();
  AlignedMemory memory{kBlocks * kBlock};
  DiskInbox inbox;
  std::vector<std::size_t> reported;  // The disk's thread, until the last one was taken.
  std::unique_ptr<Disk> disk;
};

TEST_SUITE("Disk, reports") {
  TEST_CASE("without an interval each read is reported before the next one is hashed") {
    Fixture f(Duration::zero());
    f.read_together(1, 4);
    CHECK(f.reported == std::vector<std::size_t>{0, 1, 2, 3});
  }

  TEST_CASE("the first read is reported at once, and later ones when no other is in flight") {
    Fixture f(std::chrono::hours(1));
    f.read_together(1, 1);
    f.read_together(2, 1);
    CHECK(f.reported == std::vector<std::size_t>{0, 1});
  }

  TEST_CASE("within the interval reads are reported with a quarter of the bytes in flight") {
    Fixture f(std::chrono::hours(1));
    f.read_together(1, 1);

    f.read_together(2, 5);

    CHECK(f.reported == std::vector<std::size_t>{0, 1, 1, 3, 3, 5});
  }

  TEST_CASE("at the end of the interval reads are reported although others are in flight") {
    Fixture f(std::chrono::nanoseconds(1));
    f.read_together(1, 4);
    CHECK(f.reported == std::vector<std::size_t>{0, 1, 2, 3});
  }

  TEST_CASE("a read that fails is reported at once, with those before it") {
    Fixture f(std::chrono::hours(1));
    f.read_together(1, 1);

    std::vector<Disk::Request> requests;
    for (std::uint64_t ticket = 2; ticket < 6; ++ticket) {
      requests.push_back(f.read(ticket, Error{.code = Errc::kCorrupt, .detail = "played"}));
    }
    REQUIRE(f.disk->submit(std::move(requests)));

    for (std::uint64_t ticket = 2; ticket < 6; ++ticket) CHECK(f.inbox.take(ticket).error);
    CHECK(f.reported == std::vector<std::size_t>{0, 1, 2, 3, 4});
  }
}

}  // namespace
}  // namespace pegaflow::testing
