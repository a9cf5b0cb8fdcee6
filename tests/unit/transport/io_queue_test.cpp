// The order of a disk's requests and the bytes in flight, without any I/O.
#include "transport/disk/io_queue.h"

#include <cerrno>
#include <map>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/disk_inbox.h"
#include "tests/support/seed.h"

namespace pegaflow::testing {
namespace {

using disk::IoQueue;
using disk::Piece;
using Operation = Disk::Operation;
using Priority = Disk::Priority;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

/// A queue whose pieces are ended by the test.
struct Bench {
  explicit Bench(Disk::Limits limits = {}, std::size_t pieces = 512)
      : queue({.limits = limits, .pieces = pieces, .path = "the test's"}) {}

  void add(std::uint64_t ticket, Operation operation, std::uint64_t bytes,
           Priority priority = Priority::kForeground, Disk::Hook hook = {}) {
    Disk::Request request{.ticket = ticket,
                          .operation = operation,
                          .priority = priority,
                          .offset = ticket * 64 * kMiB,
                          .hook = std::move(hook)};
    if (bytes > 0) request.memory = {memory.part(0, bytes)};
    queue.accept(std::move(request), clock.now());
  }
  /// Begins everything that may begin now.
  std::vector<Piece> begin() {
    std::vector<Piece> pieces;
    while (const std::optional<Piece> piece = queue.next(clock.now())) pieces.push_back(*piece);
    return pieces;
  }
  void end(const Piece& piece) {
    queue.ended(piece.id, static_cast<std::int64_t>(piece.size_bytes), clock.now());
  }
  std::vector<Disk::Completion> finished() {
    std::vector<Disk::Completion> completions;
    while (std::optional<IoQueue::Finished> one = queue.take_finished()) {
      completions.push_back(std::move(one->completion));
    }
    return completions;
  }
  /// The tickets that pieces belong to: offsets begin at a multiple of 64 MiB for each.
  static std::vector<std::uint64_t> tickets(const std::vector<Piece>& pieces) {
    std::vector<std::uint64_t> tickets;
    for (const Piece& piece : pieces) tickets.push_back(piece.offset / (64 * kMiB));
    return tickets;
  }

  ManualClock clock;
  AlignedMemory memory{64 * kMiB};
  IoQueue queue;
};

using Tickets = std::vector<std::uint64_t>;

TEST_SUITE("IoQueue") {
  TEST_CASE("a request is cut into pieces that cover its range once, in its memory's order") {
    Bench bench;
    std::mt19937_64 random(seed());
    for (std::uint64_t round = 0; round < 200; ++round) {
      Disk::Request request{.ticket = round, .offset = random() % 1000 * Disk::kAlignment};
      std::vector<std::byte*> addresses;  // By page of the request.
      const std::uint64_t spans = 1 + random() % 20;
      std::uint64_t at = 0;
      for (std::uint64_t i = 0; i < spans; ++i) {
        const std::uint64_t pages = 1 + random() % 100;
        at += random() % 2 * Disk::kAlignment;  // Contiguous to the last one, or not.
        const auto span = bench.memory.part(at, pages * Disk::kAlignment);
        at += span.size();
        request.memory.push_back(span);
        for (std::uint64_t page = 0; page < pages; ++page) {
          addresses.push_back(span.data() + page * Disk::kAlignment);
        }
      }
      const std::uint64_t offset = request.offset;
      bench.queue.accept(std::move(request), bench.clock.now());

      std::size_t page = 0;
      for (const Piece& piece : bench.begin()) {
        REQUIRE(piece.offset == offset + page * Disk::kAlignment);
        REQUIRE(piece.size_bytes <= kMiB);
        std::uint64_t bytes = 0;
        const std::byte* last_end = nullptr;
        for (const iovec& part : piece.memory) {
          REQUIRE(part.iov_base != last_end);  // Contiguous spans are one.
          last_end = static_cast<std::byte*>(part.iov_base) + part.iov_len;
          for (std::size_t i = 0; i < part.iov_len; i += Disk::kAlignment, ++page) {
            REQUIRE(static_cast<std::byte*>(part.iov_base) + i == addresses[page]);
          }
          bytes += part.iov_len;
        }
        REQUIRE(bytes == piece.size_bytes);
        bench.end(piece);
      }
      REQUIRE(page == addresses.size());
      REQUIRE(bench.finished().size() == 1);
    }
    CHECK(bench.queue.is_empty());
  }

  TEST_CASE("durable writes and flushes come first, then foreground, background and writes") {
    Bench bench;
    bench.add(1, Operation::kWrite, kMiB);
    bench.add(2, Operation::kRead, kMiB, Priority::kBackground);
    bench.add(3, Operation::kRead, kMiB);
    bench.add(4, Operation::kFlush, 0);
    bench.add(5, Operation::kDurableWrite, kMiB);

    // The write waits for the foreground read.
    CHECK(Bench::tickets(bench.begin()) == Tickets{4, 5, 3, 2});
  }

  TEST_CASE("reads in flight stay within their limit, and half of it for the background") {
    Bench bench({.read_bytes = 4 * kMiB});
    bench.add(1, Operation::kRead, 8 * kMiB, Priority::kBackground);

    const std::vector<Piece> background = bench.begin();
    CHECK(background.size() == 2);
    bench.add(2, Operation::kRead, 8 * kMiB);
    const std::vector<Piece> foreground = bench.begin();

    CHECK(Bench::tickets(foreground) == Tickets{2, 2});
    bench.end(background[0]);
    // The room goes to the foreground, whose request waits.
    CHECK(Bench::tickets(bench.begin()) == Tickets{2});
    CHECK(bench.queue.stats().reads.bytes_in_flight == 4 * kMiB);
    CHECK(bench.queue.stats().reads.bytes_queued == 11 * kMiB);
  }

  TEST_CASE("a piece that hangs counts until it is reaped, and the others go on") {
    Bench bench({.read_bytes = 2 * kMiB});
    bench.add(1, Operation::kRead, kMiB);
    const std::vector<Piece> hung = bench.begin();
    for (std::uint64_t ticket = 2; ticket < 50; ++ticket) {
      bench.add(ticket, Operation::kRead, kMiB);
      const std::vector<Piece> pieces = bench.begin();
      REQUIRE(Bench::tickets(pieces) == Tickets{ticket});
      CHECK(bench.queue.stats().reads.bytes_in_flight == 2 * kMiB);
      bench.end(pieces[0]);
      REQUIRE(bench.finished().size() == 1);
      bench.clock.advance(std::chrono::hours(1));
    }
    CHECK_NOTHROW(bench.queue.cancel(1, bench.clock.now()));
    CHECK(bench.finished().empty());
    CHECK(bench.queue.stats().reads.bytes_in_flight == kMiB);

    bench.end(hung[0]);

    const std::vector<Disk::Completion> completions = bench.finished();
    REQUIRE(completions.size() == 1);
    CHECK_FALSE(completions[0].error);
    CHECK(completions[0].service == std::chrono::hours(48));
    CHECK(bench.queue.is_empty());
  }

  TEST_CASE("beside foreground reads, writes get a tenth of the bytes, and all of it otherwise") {
    Bench bench({.read_bytes = 8 * kMiB, .write_bytes = 8 * kMiB});
    std::uint64_t next_read = 1'000'000;
    std::uint64_t read_bytes = 0;
    std::uint64_t write_bytes = 0;
    for (std::uint64_t ticket = 0; ticket < 100; ++ticket) {
      bench.add(ticket, Operation::kWrite, 8 * kMiB);
    }
    std::vector<Piece> alone = bench.begin();
    CHECK(alone.size() == 8);
    for (const Piece& piece : alone) bench.end(piece);

    std::vector<Piece> flying;
    for (int round = 0; round < 3000; ++round) {
      while (bench.queue.stats().reads.bytes_queued < 16 * kMiB) {
        bench.add(next_read++, Operation::kRead, 256 << 10);
      }
      for (const Piece& piece : bench.begin()) flying.push_back(piece);
      REQUIRE_FALSE(flying.empty());
      const Piece first = flying.front();
      flying.erase(flying.begin());
      (first.operation == Operation::kRead ? read_bytes : write_bytes) += first.size_bytes;
      bench.end(first);
      bench.finished();
    }

    const double share =
        static_cast<double>(write_bytes) / static_cast<double>(read_bytes + write_bytes);
    CHECK(share > 0.095);
    CHECK(share < 0.105);
  }

  TEST_CASE("writes go on slowly while the reads hang") {
    Bench bench;
    bench.add(1, Operation::kRead, kMiB);
    bench.begin();
    bench.add(2, Operation::kWrite, 3 * kMiB);
    CHECK(bench.begin().empty());

    std::uint64_t begun = 0;
    for (int i = 0; i < 100 && begun < 3; ++i) {
      const TimePoint next = bench.queue.next_time();
      REQUIRE(next != TimePoint::max());
      REQUIRE(next > bench.clock.now());
      bench.clock.advance(next - bench.clock.now());
      for (const Piece& piece : bench.begin()) {
        ++begun;
        bench.end(piece);
      }
    }
    CHECK(begun == 3);
    CHECK(bench.finished().size() == 1);
    CHECK(bench.clock.now().time_since_epoch() == 3 * std::chrono::milliseconds(100));
    CHECK(bench.queue.next_time() == TimePoint::max());
  }

  TEST_CASE("the hook of a write runs when the write is next, once, and before any of its pieces") {
    Bench bench({.write_bytes = 2 * kMiB});
    int runs = 0;
    const Disk::Hook hook = [&](Disk::Completion& completion) -> Result<void> {
      completion.checksums = {static_cast<std::uint64_t>(++runs)};
      return {};
    };
    bench.add(1, Operation::kWrite, 4 * kMiB, Priority::kForeground, hook);
    CHECK(bench.begin().empty());
    REQUIRE(bench.queue.must_prepare(bench.clock.now()));

    bench.queue.prepare(bench.clock.now());

    CHECK(runs == 1);
    CHECK_FALSE(bench.queue.must_prepare(bench.clock.now()));
    for (int i = 0; i < 2; ++i) {
      const std::vector<Piece> pieces = bench.begin();
      CHECK(pieces.size() == 2);
      for (const Piece& piece : pieces) bench.end(piece);
    }
    const std::vector<Disk::Completion> completions = bench.finished();
    REQUIRE(completions.size() == 1);
    CHECK(completions[0].checksums == Tickets{1});
    CHECK(runs == 1);
  }

  TEST_CASE("an error and a short transfer end a request after its pieces in flight") {
    for (const std::int64_t result :
         {std::int64_t{-EIO}, std::int64_t{-ENOSPC}, std::int64_t{4096}, std::int64_t{0}}) {
      Bench bench({.read_bytes = 2 * kMiB});
      bool hooked = false;
      bench.add(1, Operation::kRead, 8 * kMiB, Priority::kForeground,
                [&](Disk::Completion&) -> Result<void> {
                  hooked = true;
                  return {};
                });
      const std::vector<Piece> pieces = bench.begin();
      REQUIRE(pieces.size() == 2);

      bench.queue.ended(pieces[0].id, result, bench.clock.now());

      CHECK(bench.begin().empty());
      CHECK(bench.finished().empty());
      bench.end(pieces[1]);
      const std::vector<Disk::Completion> completions = bench.finished();
      REQUIRE(completions.size() == 1);
      CHECK(completions[0].error->code == (result == -ENOSPC ? Errc::kOutOfCapacity : Errc::kIo));
      CHECK(completions[0].error_number == (result < 0 ? -result : 0));
      CHECK(completions[0].error->detail.find("read of 1048576 bytes at 67108864 in the test's") ==
            0);
      CHECK_FALSE(hooked);
      CHECK(bench.queue.stats().reads.errors == 1);
      CHECK(bench.queue.stats().reads.bytes_queued == 0);
    }
  }

  TEST_CASE("a cancelled request passes no further piece, and completes after those in flight") {
    Bench bench({.write_bytes = kMiB});
    bench.add(1, Operation::kWrite, 4 * kMiB);
    bench.add(2, Operation::kWrite, kMiB);
    const std::vector<Piece> pieces = bench.begin();
    REQUIRE(pieces.size() == 1);

    bench.queue.cancel(2, bench.clock.now());
    bench.queue.cancel(1, bench.clock.now());
    bench.queue.cancel(1, bench.clock.now());

    std::vector<Disk::Completion> completions = bench.finished();
    REQUIRE(completions.size() == 1);
    CHECK(completions[0].ticket == 2);
    CHECK(completions[0].error->code == Errc::kCancelled);
    CHECK(bench.begin().empty());
    bench.end(pieces[0]);
    completions = bench.finished();
    REQUIRE(completions.size() == 1);
    CHECK(completions[0].ticket == 1);
    CHECK(completions[0].error->code == Errc::kCancelled);
    CHECK(bench.queue.is_empty());
    CHECK(bench.queue.stats().writes.bytes_queued == 0);
    CHECK(bench.queue.stats().writes.errors == 0);
  }

  TEST_CASE("no more pieces are in flight than the engine has places") {
    Bench bench({}, 3);
    for (std::uint64_t ticket = 0; ticket < 10; ++ticket) {
      bench.add(ticket, ticket % 2 == 0 ? Operation::kRead : Operation::kFlush,
                ticket % 2 == 0 ? 4096 : 0);
    }
    std::size_t ended = 0;
    while (ended < 10) {
      const std::vector<Piece> pieces = bench.begin();
      REQUIRE(bench.queue.in_flight() <= 3);
      REQUIRE_FALSE(pieces.empty());
      for (const Piece& piece : pieces) bench.end(piece);
      ended += bench.finished().size();
    }
    CHECK(bench.queue.is_empty());
  }
}

}  // namespace
}  // namespace pegaflow::testing
