#pragma once
/// \file
/// The requirements for every Disk, whatever executes its I/O. A backend's test includes this file
/// once and names its type: `TEST_CASE_TEMPLATE_INVOKE(disk_conformance, UringBackend);`. The type
/// has an absent file of its own, and
/// - `std::optional<std::string> unavailable()`, static, the reason why it cannot be tested here;
/// - `void open(const Disk::Limits&)`, which opens it with kDiskBytes, again after close(), and
///   `Result<void> try_open(const Disk::Limits&)`;
/// - `Disk& disk()`, and `void close()`, which destroys the Disk;
/// - `DiskInbox& inbox()`, and `Disk::Completion take(ticket)`, which waits for a completion.

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/disk_inbox.h"
#include "tests/support/seed.h"
#include "tests/support/skip.h"
#include "transport/checksum.h"
#include "transport/disk/hooks.h"

namespace pegaflow::testing {

constexpr std::uint64_t kDiskBytes = std::uint64_t{32} << 20;
constexpr std::uint64_t kPage = Disk::kAlignment;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

inline std::vector<std::byte> copy_of(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

inline bool equal(std::span<const std::byte> one, std::span<const std::byte> other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end());
}

/// Cuts `memory` at random pages into at most `most` spans and shuffles them, if asked.
inline std::vector<std::span<std::byte>> cut(std::span<std::byte> memory, std::mt19937_64& random,
                                             std::size_t most) {
  std::vector<std::span<std::byte>> spans;
  while (!memory.empty()) {
    const std::uint64_t pages = memory.size() / kPage;
    const std::uint64_t take =
        spans.size() + 1 == most ? pages : 1 + random() % std::max<std::uint64_t>(pages / 2, 1);
    spans.push_back(memory.first(take * kPage));
    memory = memory.subspan(take * kPage);
  }
  std::shuffle(spans.begin(), spans.end(), random);
  return spans;
}

inline std::vector<std::byte> gathered(std::span<const std::span<std::byte>> spans) {
  std::vector<std::byte> bytes;
  for (const std::span<std::byte> span : spans) bytes.insert(bytes.end(), span.begin(), span.end());
  return bytes;
}

TEST_CASE_TEMPLATE_DEFINE("a disk", Backend, disk_conformance) {
  using Operation = Disk::Operation;
  if (const std::optional<std::string> reason = Backend::unavailable()) PEGA_SKIP(*reason);
  Backend backend;
  std::mt19937_64 random(seed());
  const auto write = [&](std::uint64_t ticket, std::uint64_t offset,
                         std::vector<std::span<std::byte>> memory, Disk::Hook hook = {}) {
    return Disk::Request{.ticket = ticket,
                         .operation = Operation::kWrite,
                         .offset = offset,
                         .memory = std::move(memory),
                         .hook = std::move(hook)};
  };
  const auto read = [&](std::uint64_t ticket, std::uint64_t offset,
                        std::vector<std::span<std::byte>> memory, Disk::Hook hook = {}) {
    return Disk::Request{.ticket = ticket,
                         .operation = Operation::kRead,
                         .offset = offset,
                         .memory = std::move(memory),
                         .hook = std::move(hook)};
  };

  SUBCASE("reads what was written, through any cut of memory, and zeros elsewhere") {
    backend.open({});
    std::vector<std::byte> expected(kDiskBytes);
    for (std::uint64_t round = 0; round < 30; ++round) {
      const std::uint64_t pages = 1 + random() % (round % 3 == 0 ? 1200 : 20);
      const std::uint64_t offset = random() % (kDiskBytes / kPage - pages + 1) * kPage;
      const AlignedMemory source(pages * kPage);
      source.fill(random);
      const auto spans = cut(source.span(), random, 1 + random() % 40);
      const std::vector<std::byte> bytes = gathered(spans);
      std::copy(bytes.begin(), bytes.end(), expected.begin() + static_cast<std::ptrdiff_t>(offset));

      REQUIRE(backend.disk().submit(write(round, offset, spans)));

      const Disk::Completion completion = backend.take(round);
      REQUIRE_MESSAGE(!completion.error, to_string(*completion.error));
      CHECK(completion.operation == Operation::kWrite);
      CHECK(completion.waited >= Duration::zero());
      CHECK(completion.service >= Duration::zero());
    }

    const AlignedMemory target(kDiskBytes);
    const auto spans = cut(target.span(), random, 100);
    REQUIRE(backend.disk().submit(read(100, 0, spans)));

    CHECK_FALSE(backend.take(100).error);
    CHECK(equal(gathered(spans), expected));
  }

  SUBCASE("describes itself, and keeps its content when it is opened again") {
    backend.open({});
    CHECK(backend.disk().attributes().is_new);
    CHECK_FALSE(backend.disk().attributes().backend.empty());
    CHECK_FALSE(backend.disk().attributes().reason.empty());
    CHECK(backend.disk().size_bytes() == kDiskBytes);
    const AlignedMemory source(8 * kPage);
    source.fill(random);
    REQUIRE(backend.disk().submit(write(1, 5 * kPage, {source.span()})));
    REQUIRE_FALSE(backend.take(1).error);

    backend.close();
    backend.open({});

    CHECK_FALSE(backend.disk().attributes().is_new);
    const AlignedMemory target(8 * kPage);
    REQUIRE(backend.disk().submit(read(1, 5 * kPage, {target.span()})));
    REQUIRE_FALSE(backend.take(1).error);
    CHECK(equal(target.span(), source.span()));
  }

  SUBCASE("rejects invalid requests, and with one of them its whole batch") {
    backend.open({});
    const AlignedMemory memory(4 * kPage);
    const std::vector<std::span<std::byte>> good = {memory.part(0, kPage)};
    const std::vector<Disk::Request> invalid = {
        read(9, 0, {}),
        read(9, 1, good),
        read(9, 512, good),
        read(9, 0, {memory.part(0, 512)}),
        read(9, 0, {memory.part(512, kPage)}),
        read(9, 0, {memory.part(0, kPage), memory.part(kPage, 0)}),
        read(9, kDiskBytes, good),
        read(9, kDiskBytes - kPage, {memory.part(0, 2 * kPage)}),
        read(9, std::numeric_limits<std::uint64_t>::max() - kPage + 1, good),
        read(9, 0, std::vector<std::span<std::byte>>(Disk::kMostPieces + 1, good[0])),
        write(9, kDiskBytes, good),
        Disk::Request{.ticket = 9, .operation = Operation::kFlush, .memory = good}};
    for (const Disk::Request& request : invalid) {
      std::vector<Disk::Request> batch = {read(8, 0, good), request};

      const Result<void> accepted = backend.disk().submit(std::move(batch));

      REQUIRE_FALSE(accepted);
      CHECK(accepted.error().code == Errc::kInvalidArgument);
    }
    CHECK(backend.disk().stats().open_requests == 0);
    CHECK(backend.disk().submit(std::vector<Disk::Request>()));
  }

  SUBCASE("is busy beyond its number of requests, and takes new ones after completions") {
    backend.open({.requests = 4});
    const AlignedMemory memory(5 * kPage);
    const auto batch = [&](std::uint64_t first, std::uint64_t count) {
      std::vector<Disk::Request> requests;
      for (std::uint64_t i = 0; i < count; ++i) {
        requests.push_back(read(first + i, i * kPage, {memory.part(i * kPage, kPage)}));
      }
      return requests;
    };

    const Result<void> too_many = backend.disk().submit(batch(0, 5));

    REQUIRE_FALSE(too_many);
    CHECK(too_many.error().code == Errc::kBusy);
    for (std::uint64_t round = 0; round < 50; ++round) {
      REQUIRE(backend.disk().submit(batch(4 * round, 4)));
      for (std::uint64_t i = 0; i < 4; ++i) CHECK_FALSE(backend.take(4 * round + i).error);
    }
    CHECK(backend.disk().stats().reads.requests == 200);
    CHECK(backend.disk().stats().reads.bytes == 200 * kPage);
  }

  SUBCASE("keeps the bytes in flight within its limits") {
    backend.open({.read_bytes = 2 * kMiB, .write_bytes = kMiB});
    const AlignedMemory memory(kDiskBytes);
    std::atomic<std::uint64_t> most_reads{0};
    std::atomic<std::uint64_t> most_writes{0};
    Disk& disk = backend.disk();
    const Disk::Hook watch = [&](Disk::Completion&) -> Result<void> {
      const Disk::Stats stats = disk.stats();
      most_reads = std::max(most_reads.load(), stats.reads.bytes_in_flight);
      most_writes = std::max(most_writes.load(), stats.writes.bytes_in_flight);
      return {};
    };
    std::vector<Disk::Request> requests;
    for (std::uint64_t i = 0; i < 8; ++i) {
      const auto part = memory.part(4 * i * kMiB, 2 * kMiB);
      requests.push_back(i % 2 == 0 ? read(i, i * kMiB, {part}, watch)
                                    : write(i, i * kMiB, {part}, watch));
    }
    for (std::uint64_t i = 8; i < 200; ++i) {
      const auto part = memory.part(2 * kMiB + i % 8 * kPage, kPage);
      requests.push_back(i % 2 == 0 ? read(i, i * kPage, {part}, watch)
                                    : write(i, i * kPage, {part}, watch));
    }

    REQUIRE(backend.disk().submit(std::move(requests)));

    for (std::uint64_t i = 0; i < 200; ++i) CHECK_FALSE(backend.take(i).error);
    CHECK(most_reads.load() <= 2 * kMiB);
    CHECK(most_reads.load() > 0);
    CHECK(most_writes.load() <= kMiB);
    CHECK(disk.stats().reads.bytes_in_flight == 0);
    CHECK(disk.stats().writes.bytes_in_flight == 0);
    CHECK(disk.stats().reads.bytes_queued == 0);
    CHECK(disk.stats().writes.bytes_queued == 0);
  }

  SUBCASE("hashes pages before a write and behind a read") {
    backend.open({});
    const AlignedMemory source(64 * kPage);
    source.fill(random);
    const auto spans = cut(source.span(), random, 7);
    // Pages of odd sizes that cross the spans, and a rest that is not hashed.
    const std::vector<std::uint64_t> pages = {1, 4095, 70'000, 100'001, 33, 0};

    REQUIRE(backend.disk().submit(write(1, 0, spans, disk::take_checksums(spans, pages))));
    const Disk::Completion written = backend.take(1);
    const AlignedMemory target(64 * kPage);
    const auto places = cut(target.span(), random, 5);
    REQUIRE(backend.disk().submit(read(2, 0, places, disk::take_checksums(places, pages))));
    const Disk::Completion got = backend.take(2);

    const std::vector<std::byte> bytes = gathered(spans);
    std::vector<std::uint64_t> expected;
    std::size_t at = 0;
    for (const std::uint64_t page : pages) {
      expected.push_back(PageChecksum::of(std::span(bytes).subspan(at, page)));
      at += page;
    }
    REQUIRE_FALSE(written.error);
    REQUIRE_FALSE(got.error);
    CHECK(written.checksums == expected);
    CHECK(got.checksums == expected);
  }

  SUBCASE("does not perform a write whose hook fails, and reports a read's hook") {
    backend.open({});
    const AlignedMemory memory(2 * kPage);
    memory.fill(random);
    const Disk::Hook refuse = [](Disk::Completion&) -> Result<void> {
      return fail(Errc::kCorrupt, "the page differs from its checksum");
    };

    REQUIRE(backend.disk().submit(write(1, 0, {memory.part(0, kPage)}, refuse)));
    CHECK(backend.take(1).error->code == Errc::kCorrupt);
    REQUIRE(backend.disk().submit(read(2, 0, {memory.part(kPage, kPage)}, refuse)));
    CHECK(backend.take(2).error->detail == "the page differs from its checksum");

    const std::vector<std::byte> zeros(kPage);
    CHECK(equal(memory.part(kPage, kPage), zeros));
    CHECK(backend.disk().stats().writes.errors == 1);
    CHECK(backend.disk().stats().writes.bytes == 0);
  }

  SUBCASE("completes each request once when most of them are cancelled") {
    backend.open({.read_bytes = kMiB, .write_bytes = kMiB});
    const AlignedMemory memory(kDiskBytes);
    memory.fill(random);
    std::vector<Disk::Request> requests;
    for (std::uint64_t i = 0; i < 32; ++i) {
      requests.push_back(write(i, i * kMiB, {memory.part(i * kMiB, kMiB)}));
    }
    REQUIRE(backend.disk().submit(std::move(requests)));
    for (std::uint64_t i = 8; i < 32; ++i) CHECK(backend.disk().cancel(i));
    CHECK(backend.disk().cancel(4711));

    const AlignedMemory target(kMiB);
    const std::vector<std::byte> zeros(kMiB);
    for (std::uint64_t i = 0; i < 32; ++i) {
      const Disk::Completion completion = backend.take(i);
      if (i < 8) CHECK_FALSE(completion.error);
      const bool was_written = !completion.error;
      if (!was_written) CHECK(completion.error->code == Errc::kCancelled);
      REQUIRE(backend.disk().submit(read(100 + i, i * kMiB, {target.span()})));
      REQUIRE_FALSE(backend.take(100 + i).error);
      // A write of one piece is either performed or not.
      CHECK(equal(target.span(), was_written ? memory.part(i * kMiB, kMiB) : std::span(zeros)));
    }
    CHECK(backend.disk().stats().writes.errors == 0);
    CHECK(backend.disk().stats().open_requests == 0);
  }

  SUBCASE("completes everything before it is destroyed") {
    backend.open({.read_bytes = kMiB, .write_bytes = kMiB});
    const AlignedMemory memory(kDiskBytes);
    std::vector<Disk::Request> requests;
    for (std::uint64_t i = 0; i < 16; ++i) {
      requests.push_back(read(i, 2 * i * kMiB, {memory.part(2 * i * kMiB, 2 * kMiB)}));
    }
    requests.push_back({.ticket = 16, .operation = Operation::kFlush});
    REQUIRE(backend.disk().submit(std::move(requests)));

    backend.close();

    std::size_t cancelled = 0;
    for (std::uint64_t i = 0; i < 17; ++i) {
      REQUIRE(backend.inbox().has(i));
      const Disk::Completion completion = backend.inbox().take(i);
      if (!completion.error) continue;
      CHECK(completion.error->code == Errc::kCancelled);
      ++cancelled;
    }
    CHECK(cancelled <= 17);
  }

  SUBCASE("flushes, and writes durably") {
    backend.open({});
    const AlignedMemory memory(3 * kMiB);
    memory.fill(random);
    REQUIRE(backend.disk().submit({.ticket = 1,
                                   .operation = Operation::kDurableWrite,
                                   .offset = kPage,
                                   .memory = {memory.span()}}));
    CHECK_FALSE(backend.take(1).error);
    REQUIRE(backend.disk().submit({.ticket = 2, .operation = Operation::kFlush}));
    const Disk::Completion flushed = backend.take(2);
    CHECK_FALSE(flushed.error);
    CHECK(flushed.operation == Operation::kFlush);

    const AlignedMemory target(3 * kMiB);
    REQUIRE(backend.disk().submit(read(3, kPage, {target.span()})));
    CHECK_FALSE(backend.take(3).error);
    CHECK(equal(target.span(), memory.span()));
    CHECK(backend.disk().stats().flushes == 1);
    CHECK(backend.disk().stats().flush_errors == 0);
  }

  SUBCASE("is cut and extended while it is idle") {
    backend.open({});
    const AlignedMemory memory(kPage);
    CHECK(backend.disk().resize(0).error().code == Errc::kInvalidArgument);
    CHECK(backend.disk().resize(kPage + 1).error().code == Errc::kInvalidArgument);

    REQUIRE(backend.disk().resize(kMiB));

    CHECK(backend.disk().size_bytes() == kMiB);
    CHECK(backend.disk().submit(read(1, kMiB, {memory.span()})).error().code ==
          Errc::kInvalidArgument);
    REQUIRE(backend.disk().resize(2 * kMiB));
    REQUIRE(backend.disk().submit(read(1, kMiB, {memory.span()})));
    CHECK_FALSE(backend.take(1).error);
  }

  SUBCASE("refuses limits that are out of their range") {
    for (const Disk::Limits& limits :
         {Disk::Limits{.read_bytes = kPage}, Disk::Limits{.write_bytes = kMiB * 4096},
          Disk::Limits{.requests = 0}, Disk::Limits{.requests = Disk::kMostQueued + 1}}) {
      CHECK(backend.try_open(limits).error().code == Errc::kInvalidArgument);
    }
  }
}

}  // namespace pegaflow::testing
