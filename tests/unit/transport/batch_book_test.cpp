// The book of batches, without a lane: what is requested, in which order, and how batches end.
#include "transport/batch_book.h"

#include <doctest/doctest.h>

namespace pegaflow::rails {
namespace {

using std::chrono::seconds;
using Turn = BatchBook::Turn;

constexpr RegionId kOurs{0};
constexpr RegionId kOther{1};
constexpr RegionId kTheirs{7};
constexpr std::uint64_t kRegionBytes = 1 << 20;
constexpr std::uint64_t kPieceBytes = 4096;

struct Bench {
  Bench() {
    for (BatchBook::Peer* const each : {&peer, &other_peer}) {
      each->regions = {{.region = kTheirs, .size_bytes = kRegionBytes}};
    }
  }
  [[nodiscard]] static Fabric::Chunk chunk(std::uint64_t from, std::uint64_t to, std::uint64_t size,
                                           RegionId local = kOurs) {
    return {.remote_region = kTheirs,
            .remote_offset = from,
            .local_region = local,
            .local_offset = to,
            .size_bytes = size};
  }
  BatchBook::Entry* add(std::uint64_t ticket, std::vector<Fabric::Chunk> chunks,
                        BatchBook::Peer* of) {
    BatchBook::Entry* const entry = book.add(
        {.ticket = ticket, .deadline = clock.now() + seconds(1), .chunks = std::move(chunks)}, of);
    if (entry != nullptr) entry->piece_bytes = kPieceBytes;
    return entry;
  }
  BatchBook::Entry& add(std::uint64_t ticket, std::vector<Fabric::Chunk> chunks) {
    BatchBook::Entry* const entry = add(ticket, std::move(chunks), &peer);
    REQUIRE(entry != nullptr);
    return *entry;
  }
  /// Requests the next operation, which there is.
  Operation begin(BatchBook::Entry& entry) {
    const std::optional<Operation> operation = book.next(entry);
    REQUIRE(operation);
    book.begin(entry, *operation);
    return *operation;
  }
  /// Ends the operation in one of the three ways.
  void end(const Operation& operation, int way) {
    if (way == 0) book.done(operation);
    if (way == 1) book.failed(operation, Errc::kGone, [] { return "gone"; });
    if (way == 2) book.give_back(operation, Turn::kLast);
  }
  /// The only completion since the last call.
  Fabric::Completion completion() {
    REQUIRE(completions.size() == 1);
    return std::exchange(completions, {}).front();
  }

  ManualClock clock;
  BatchBook::Peer peer;
  BatchBook::Peer other_peer;
  std::vector<Fabric::Completion> completions;
  BatchBook book{
      clock, [](RegionId region) { return region == kOurs || region == kOther ? kRegionBytes : 0; },
      [this](Fabric::Completion&& done) { completions.push_back(std::move(done)); }};
};

TEST_SUITE("BatchBook") {
  TEST_CASE("chunks are cut into pieces, requested in order, and completed once") {
    Bench bench;
    BatchBook::Entry& entry =
        bench.add(5, {Bench::chunk(0, 8192, 6000), Bench::chunk(6000, 14192, 100)});

    const Operation first = bench.begin(entry);
    const Operation second = bench.begin(entry);
    const Operation third = bench.begin(entry);

    CHECK(first.remote_offset == 0);
    CHECK(first.local_offset == 8192);
    CHECK(first.size_bytes == kPieceBytes);
    CHECK(second.first_chunk == 0);
    CHECK(second.first_offset == kPieceBytes);
    CHECK(second.remote_offset == kPieceBytes);
    CHECK(second.size_bytes == 6000 - kPieceBytes);
    CHECK(third.first_chunk == 1);
    CHECK(third.size_bytes == 100);
    CHECK_FALSE(bench.book.next(entry));
    CHECK_FALSE(bench.peer.has_waiting());
    bench.book.done(third);
    bench.book.done(first);
    CHECK(bench.completions.empty());
    CHECK(bench.book.touches(kOurs));
    bench.book.done(second);
    const Fabric::Completion completion = bench.completion();
    CHECK(completion.ticket == 5);
    CHECK(completion.quiesced);
    CHECK(completion.chunks == std::vector<std::optional<Errc>>(2));
    CHECK_FALSE(bench.book.touches(kOurs));
    CHECK(bench.book.next_deadline() == TimePoint::max());
  }

  TEST_CASE("an operation may cover the chunks behind its own") {
    Bench bench;
    BatchBook::Entry& entry = bench.add(
        1, {Bench::chunk(0, 0, 100), Bench::chunk(100, 100, 50), Bench::chunk(150, 150, 50)});

    std::optional<Operation> operation = bench.book.next(entry);
    REQUIRE(operation);
    operation->size_bytes += 50;
    bench.book.begin(entry, *operation);

    const Operation last = bench.begin(entry);
    CHECK(last.first_chunk == 2);
    bench.book.failed(*operation, Errc::kGone, [] { return "gone"; });
    bench.book.done(last);
    CHECK_FALSE(bench.book.next(entry));
    const std::vector<std::optional<Errc>> expected{Errc::kGone, Errc::kGone, std::nullopt};
    CHECK(bench.completion().chunks == expected);
  }

  TEST_CASE("chunks out of range are rejected, and the others are read") {
    Bench bench;
    BatchBook::Entry& entry =
        bench.add(1, {Bench::chunk(0, 0, 0), Bench::chunk(0, kRegionBytes, 1),
                      Bench::chunk(kRegionBytes, 0, 1), Bench::chunk(0, 0, 10, RegionId{9}),
                      Bench::chunk(0, 0, 10)});

    const Operation operation = bench.begin(entry);

    CHECK(operation.first_chunk == 4);
    CHECK_FALSE(bench.book.next(entry));
    bench.book.done(operation);
    const Fabric::Completion completion = bench.completion();
    for (std::size_t i = 0; i < 4; ++i) CHECK(completion.chunks[i] == Errc::kInvalidArgument);
    CHECK_FALSE(completion.chunks[4]);
    CHECK(completion.detail == "chunk 3 is out of range");
  }

  TEST_CASE("a batch for no peer, for a lost one or past its deadline completes at once") {
    Bench bench;
    CHECK(bench.add(1, {Bench::chunk(0, 0, 10)}, nullptr) == nullptr);
    CHECK(bench.completion().chunks.at(0) == Errc::kInvalidArgument);

    bench.book.lose(bench.peer, {Errc::kPeerLost, "it broke"});
    CHECK(bench.add(2, {Bench::chunk(0, 0, 10)}, &bench.peer) == nullptr);
    const Fabric::Completion lost = bench.completion();
    CHECK(lost.chunks.at(0) == Errc::kPeerLost);
    CHECK(lost.detail == "it broke");

    CHECK(bench.book.add(
              {.ticket = 3, .deadline = bench.clock.now(), .chunks = {Bench::chunk(0, 0, 10)}},
              &bench.other_peer) == nullptr);
    CHECK(bench.completion().chunks.at(0) == Errc::kTimeout);
    CHECK(bench.book.next_deadline() == TimePoint::max());
  }

  TEST_CASE(
      "a batch that is withdrawn completes at once, and is quiesced with its last operation") {
    for (const int way : {0, 1, 2}) {
      Bench bench;
      BatchBook::Entry& entry = bench.add(
          1, {Bench::chunk(0, 0, 10), Bench::chunk(10, 10, 10), Bench::chunk(20, 20, 10)});
      const Operation first = bench.begin(entry);
      const Operation second = bench.begin(entry);
      bench.book.done(first);

      bench.book.withdraw(entry, Errc::kCancelled, "cancelled");

      const Fabric::Completion completed = bench.completion();
      CHECK_FALSE(completed.quiesced);
      const std::vector<std::optional<Errc>> expected{std::nullopt, Errc::kCancelled,
                                                      Errc::kCancelled};
      CHECK(completed.chunks == expected);
      CHECK(bench.book.find_ticket(1) == nullptr);
      CHECK(bench.book.next_deadline() == TimePoint::max());
      CHECK(bench.book.touches(kOurs));
      CHECK_FALSE(bench.peer.has_waiting());
      bench.book.lose(bench.peer, {Errc::kPeerLost, "it broke"});
      CHECK(bench.completions.empty());
      bench.end(second, way);
      const Fabric::Completion quiesced = bench.completion();
      CHECK(quiesced.quiesced);
      CHECK(quiesced.ticket == 1);
      CHECK(quiesced.chunks.empty());
      CHECK_FALSE(bench.book.touches(kOurs));
    }
  }

  TEST_CASE("a batch whose operations were given back is completed and quiesced in one") {
    Bench bench;
    BatchBook::Entry& entry = bench.add(1, {Bench::chunk(0, 0, 10)});
    bench.book.give_back(bench.begin(entry), Turn::kFirst);

    bench.book.withdraw(entry, Errc::kTimeout, "late");

    const Fabric::Completion completion = bench.completion();
    CHECK(completion.quiesced);
    CHECK(completion.chunks.at(0) == Errc::kTimeout);
    CHECK(completion.detail == "late");
  }

  TEST_CASE("operations that are given back are requested first, and their batch before others") {
    Bench bench;
    BatchBook::Entry& entry = bench.add(1, {Bench::chunk(0, 0, 4 * kPieceBytes)});
    BatchBook::Entry& other = bench.add(2, {Bench::chunk(0, 0, 10)});
    std::vector<Operation> operations;
    for (int i = 0; i < 4; ++i) operations.push_back(bench.begin(entry));
    CHECK_FALSE(bench.book.next(entry));
    CHECK(bench.peer.waiting[0] == std::deque<BatchBook::Entry*>{&other});

    bench.book.give_back(operations[2], Turn::kLast);
    bench.book.give_back(operations[3], Turn::kLast);
    bench.book.give_back(operations[1], Turn::kFirst);

    CHECK(bench.peer.waiting[0] == std::deque<BatchBook::Entry*>{&entry, &other});
    CHECK(entry.waiting_bytes == 3 * kPieceBytes);
    for (const std::size_t i : {1U, 2U, 3U}) {
      const Operation again = bench.begin(entry);
      CHECK(again.first_offset == operations[i].first_offset);
      operations[i] = again;
    }
    CHECK_FALSE(bench.book.next(entry));
    for (const Operation& operation : operations) bench.book.done(operation);
    CHECK_FALSE(bench.completion().chunks.at(0));
  }

  TEST_CASE("an operation of a failed chunk is not requested again, and the first error counts") {
    Bench bench;
    BatchBook::Entry& entry = bench.add(1, {Bench::chunk(0, 0, 3 * kPieceBytes)});
    const Operation first = bench.begin(entry);
    const Operation second = bench.begin(entry);
    bench.book.give_back(first, Turn::kLast);
    bench.book.failed(second, Errc::kCorrupt, [] { return "wrong bytes"; });

    CHECK_FALSE(bench.book.next(entry));

    const Fabric::Completion completion = bench.completion();
    CHECK(completion.chunks.at(0) == Errc::kCorrupt);
    CHECK(completion.detail == "wrong bytes");
  }

  TEST_CASE("a lost peer ends its own batches, in the order in which they were added") {
    Bench bench;
    for (const std::uint64_t ticket : {30, 10, 20}) bench.add(ticket, {Bench::chunk(0, 0, 10)});
    REQUIRE(bench.add(40, {Bench::chunk(0, 0, 10)}, &bench.other_peer) != nullptr);

    bench.book.lose(bench.peer, {Errc::kPeerLost, "it broke"});
    bench.book.lose(bench.peer, {Errc::kCancelled, "later"});

    REQUIRE(bench.completions.size() == 3);
    CHECK(bench.completions[0].ticket == 30);
    CHECK(bench.completions[1].ticket == 10);
    CHECK(bench.completions[2].ticket == 20);
    CHECK(bench.peer.lost->code == Errc::kPeerLost);
    CHECK(bench.book.find_ticket(40) != nullptr);
  }

  TEST_CASE("batches are found by their deadline, ticket and region") {
    Bench bench;
    BatchBook::Entry& first = bench.add(1, {Bench::chunk(0, 0, 10)});
    bench.clock.advance(std::chrono::milliseconds(500));
    BatchBook::Entry& second = bench.add(2, {Bench::chunk(0, 0, 10, kOther)});
    BatchBook::Entry& third = bench.add(3, {Bench::chunk(0, 0, 10), Bench::chunk(9, 9, 1, kOther)});

    CHECK(bench.book.find_ticket(2) == &second);
    CHECK(bench.book.find_ticket(4) == nullptr);
    CHECK(bench.book.find(third.number) == &third);
    CHECK(bench.book.find_into(kOurs) == std::vector{first.number, third.number});
    CHECK(bench.book.find_into(kOther) == std::vector{second.number, third.number});
    CHECK_FALSE(bench.book.touches(kTheirs));

    CHECK(bench.book.find_late(bench.clock.now()) == nullptr);
    CHECK(bench.book.next_deadline() == bench.clock.now() + std::chrono::milliseconds(500));
    bench.clock.advance(std::chrono::milliseconds(500));
    REQUIRE(bench.book.find_late(bench.clock.now()) == &first);
    bench.book.withdraw(first, Errc::kTimeout, "late");
    CHECK(bench.book.find_late(bench.clock.now()) == nullptr);
    bench.clock.advance(seconds(1));
    CHECK(bench.book.find_late(bench.clock.now()) == &second);
  }
}

}  // namespace
}  // namespace pegaflow::rails
