#include "server/direct/offers.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::server {
namespace {

constexpr Id128 kWriter{1, 1};
constexpr Id128 kOther{1, 2};
constexpr Id128 kReader{2, 1};
constexpr engine::SpaceId kSpace{5};
constexpr Offers::Guarded kGuard{.place = 3, .value = 77};

std::vector<BlockKey> keys(std::uint64_t first, std::size_t count) {
  std::vector<BlockKey> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t word = (first + i) * 0x9E3779B97F4A7C15ULL;
    std::memcpy(made[i].bytes.data(), &word, sizeof word);
  }
  return made;
}

JobId job(std::uint64_t number) { return {Id128{9, 9}, number}; }

/// Two writers and a reader of one group and shard.
struct Fixture {
  Fixture() {
    add(kWriter);
    add(kOther);
    add(kReader);
  }
  void add(const Id128& connection, const std::string& group = "g", std::uint32_t shard = 0) {
    offers.add(connection, shard,
               {.group = group, .blocks = 100, .segments = {{.bytes = 8}}, .guards = 8}, {}, {});
  }
  Result<void> offer(const Id128& connection, std::uint64_t number, std::uint64_t first,
                     const std::vector<std::uint32_t>& blocks,
                     const Offers::Guarded& guard = kGuard, std::vector<bool> skipped = {}) {
    skipped.resize(blocks.size());
    return offers.offer(connection, job(number), kSpace, keys(first, blocks.size()), blocks,
                        skipped, guard);
  }
  auto read(std::uint64_t first, std::size_t count, std::uint64_t pin = 1,
            const Id128& reader = kReader) {
    return read_space(kSpace, first, count, pin, reader);
  }
  std::optional<Offers::Found> read_space(engine::SpaceId space, std::uint64_t first,
                                          std::size_t count, std::uint64_t pin = 1,
                                          const Id128& reader = kReader) {
    const auto worker = offers.reader(reader);
    if (!worker) return std::nullopt;
    return offers.begin_read(reader, *worker, space, keys(first, count), pin);
  }
  [[nodiscard]] std::vector<Offers::Reader> readers(std::span<const Id128> connections) const {
    std::vector<Offers::Reader> workers;
    for (const Id128& each : connections) workers.push_back(offers.reader(each).value());
    return workers;
  }
  Offers offers;
};

TEST_CASE("a worker reads the leading blocks that one other worker saves") {
  Fixture f;
  REQUIRE(f.offer(kWriter, 1, 0, {10, 11, 12}));
  REQUIRE(f.offer(kWriter, 2, 3, {20}, {.place = 4, .value = 78}));
  const auto found = f.read(1, 8);
  REQUIRE(found);
  CHECK(found->source->connection == kWriter);
  CHECK(found->blocks == std::vector<std::uint32_t>{11, 12, 20});
  REQUIRE(found->guards.size() == 2);
  CHECK(found->guards[0].guard.value == 77);
  CHECK(found->guards[0].blocks == 2);
  CHECK(found->guards[1].guard.place == 4);
  CHECK(found->guards[1].blocks == 1);
  CHECK_FALSE(f.read(4, 1));
}

TEST_CASE("blocks of a second worker are read after those of the first") {
  Fixture f;
  REQUIRE(f.offer(kWriter, 1, 0, {10}));
  REQUIRE(f.offer(kOther, 1, 1, {30}));
  CHECK(f.read(0, 2)->blocks == std::vector<std::uint32_t>{10});
  CHECK(f.read(1, 1)->source->connection == kOther);
}

TEST_CASE("a worker reads no blocks of another group, shard or generation, or its own ones") {
  Fixture f;
  constexpr Id128 kStranger{3, 1};
  constexpr Id128 kNeighbor{3, 2};
  f.add(kStranger, "another");
  f.add(kNeighbor, "g", 1);
  REQUIRE(f.offer(kWriter, 1, 0, {10}));
  CHECK_FALSE(f.read(0, 1, 1, kStranger));
  CHECK_FALSE(f.read(0, 1, 1, kNeighbor));
  CHECK_FALSE(f.read(0, 1, 1, kWriter));
  CHECK_FALSE(f.read(0, 1, 1, Id128{8, 8}));
  CHECK_FALSE(f.read_space(engine::SpaceId{6}, 0, 1));
}

TEST_CASE("a key that the job does not save is not offered") {
  Fixture f;
  REQUIRE(f.offer(kWriter, 1, 0, {10, 11}, kGuard, {true, false}));
  CHECK_FALSE(f.read(0, 1));
  CHECK(f.read(1, 1));
}

TEST_CASE("a job that has ended is offered no longer, and is read until its readers end") {
  Fixture f;
  REQUIRE(f.offer(kWriter, 1, 0, {10}));
  REQUIRE(f.read(0, 1, 7));
  REQUIRE(f.read(0, 1, 8));
  f.offers.job_ended(kWriter, job(1));
  CHECK_FALSE(f.read(0, 1, 9));
  CHECK(f.offers.is_read(kWriter, job(1)));
  CHECK(f.offers.end_read(kReader, 7));
  CHECK_FALSE(f.offers.end_read(kReader, 7));
  CHECK(f.offers.is_read(kWriter, job(1)));
  CHECK(f.offers.end_read(kReader, 8));
  CHECK_FALSE(f.offers.is_read(kWriter, job(1)));
  CHECK(f.offers.stats().blocks == 0);
  CHECK(f.offers.stats().reads == 0);
}

TEST_CASE("the end of a reader's connection ends its reads, and that of a writer its offers") {
  Fixture f;
  REQUIRE(f.offer(kWriter, 1, 0, {10}));
  REQUIRE(f.read(0, 1, 7));
  f.offers.remove(kReader);
  CHECK_FALSE(f.offers.is_read(kWriter, job(1)));
  f.add(kReader);
  REQUIRE(f.read(0, 1, 7));
  f.offers.remove(kWriter);
  CHECK_FALSE(f.read(0, 1, 8));
  CHECK(f.offers.end_read(kReader, 7));
  CHECK(f.offers.stats().blocks == 0);
}

TEST_CASE("a later writer of a key replaces the first, whose end does not withdraw it") {
  Fixture f;
  REQUIRE(f.offer(kWriter, 1, 0, {10}));
  REQUIRE(f.offer(kOther, 1, 0, {30}, {.place = 0, .value = 5}));
  f.offers.job_ended(kWriter, job(1));
  CHECK(f.read(0, 1)->source->connection == kOther);
}

TEST_CASE("a worker that registers again is another source") {
  Fixture f;
  REQUIRE(f.offer(kWriter, 1, 0, {10}));
  const auto before = f.read(0, 1)->source->id;
  f.add(kWriter);
  CHECK_FALSE(f.read(0, 1));
  REQUIRE(f.offer(kWriter, 2, 0, {11}));
  CHECK(f.read(0, 1)->source->id != before);
}

TEST_CASE("a lookup counts the blocks that all ranks of its engine could read") {
  Fixture f;
  constexpr Id128 kSecond{2, 2};
  constexpr Id128 kWriterOfSecond{1, 3};
  f.add(kSecond, "g", 1);
  f.add(kWriterOfSecond, "g", 1);
  REQUIRE(f.offer(kWriter, 1, 0, {10, 11}));
  const std::vector<Id128> ranks = {kReader, kSecond};
  CHECK(f.offers.count(f.readers(ranks), kSpace, keys(0, 4)) == 0);
  REQUIRE(f.offer(kWriterOfSecond, 1, 0, {50}));
  CHECK(f.offers.count(f.readers(ranks), kSpace, keys(0, 4)) == 1);
  CHECK(f.offers.count(f.readers(std::span(ranks).first(1)), kSpace, keys(0, 4)) == 2);
  CHECK(f.offers.count({}, kSpace, keys(0, 4)) == 0);
  CHECK_FALSE(f.offers.reader(Id128{}));
}

TEST_CASE("an offer that is repeated changes nothing, and one under another guard is refused") {
  Fixture f;
  REQUIRE(f.offer(kWriter, 1, 0, {10, 11}));
  REQUIRE(f.offer(kWriter, 1, 0, {10, 11}));
  CHECK(f.offers.stats().blocks == 2);
  CHECK(f.offer(kWriter, 1, 2, {12}, {.place = 4, .value = 78}).error().code ==
        Errc::kInvalidArgument);
  CHECK(f.read(0, 3)->blocks.size() == 2);
  f.offers.job_ended(kWriter, job(1));
  CHECK(f.offers.stats().blocks == 0);
}

TEST_CASE("a worker with too many reads begins no further one until one of them ends") {
  Fixture f;
  REQUIRE(f.offer(kWriter, 1, 0, {10}));
  for (std::uint64_t pin = 1; pin <= Offers::kMostReads; ++pin) REQUIRE(f.read(0, 1, pin));
  CHECK_FALSE(f.read(0, 1, Offers::kMostReads + 1));
  CHECK(f.offers.end_read(kReader, 5));
  CHECK(f.read(0, 1, Offers::kMostReads + 1));
}

TEST_CASE("blocks that are pending are offered, and read once they are ready") {
  Fixture f;
  REQUIRE(f.offer(kWriter, 1, 0, {10, 11}));
  const std::vector<std::uint32_t> later = {12, 13};
  REQUIRE(f.offers.offer(kWriter, job(2), kSpace, keys(2, 2), later, {false, false},
                         {.place = 4, .value = 78}, true));
  const std::vector<Id128> readers = {kReader};
  CHECK(f.offers.count(f.readers(readers), kSpace, keys(0, 6)) == 4);
  CHECK(f.read(0, 4)->blocks == std::vector<std::uint32_t>{10, 11});
  CHECK_FALSE(f.read(2, 2, 2));

  CHECK(f.offers.ready(kWriter, job(2)));

  CHECK_FALSE(f.offers.ready(kWriter, job(2)));  // It was before.
  CHECK(f.read(0, 4, 3)->blocks == std::vector<std::uint32_t>{10, 11, 12, 13});
  CHECK_FALSE(f.offers.ready(kOther, job(2)));
  f.offers.job_ended(kWriter, job(2));
  f.offers.end_read(kReader, 3);
  CHECK_FALSE(f.offers.ready(kWriter, job(2)));
}

TEST_CASE("workers on GPUs are counted by their handles, or their ranges") {
  Fixture f;
  OfferedMemory memory{.group = "g", .blocks = 100, .segments = {{.bytes = 8}}, .guards = 8};
  SUBCASE("handles") { memory.segments[0].handle.emplace(); }
  SUBCASE("ranges") { memory.ranges = {{2 << 20}}; }
  f.offers.add(kOther, 0, memory, {}, {});
  CHECK(f.offers.stats().sources == 3);
  CHECK(f.offers.stats().gpu_sources == 1);
}

TEST_CASE("an offer that does not fit the registered memory is refused") {
  Fixture f;
  CHECK(f.offer(Id128{8, 8}, 1, 0, {1}).error().code == Errc::kInvalidArgument);
  CHECK(f.offer(kWriter, 1, 0, {100}).error().detail == "reserve: block 100 of 100");
  CHECK(f.offer(kWriter, 1, 0, {1}, {.place = 8, .value = 1}).error().code ==
        Errc::kInvalidArgument);
  CHECK(f.offer(kWriter, 1, 0, {1}, {.place = 0, .value = 0}).error().code ==
        Errc::kInvalidArgument);
  const std::vector<std::uint32_t> one = {1};
  CHECK(f.offers.offer(kWriter, job(1), kSpace, keys(0, 2), one, {false, false}, kGuard)
            .error()
            .detail == "reserve: 1 blocks for 2 keys");
  CHECK(f.offers.stats().blocks == 0);
}

TEST_CASE("a worker of another node reads only memory with a network") {
  Fixture f;
  constexpr Id128 kNode{7, 7};
  const Offers::Reader reader{.group = "g", .shard = 0, .is_there = true};
  REQUIRE(f.offer(kWriter, 1, 0, {10, 11}));
  CHECK(f.offers.count(std::span(&reader, 1), kSpace, keys(0, 2)) == 0);
  CHECK_FALSE(f.offers.begin_read(kNode, reader, kSpace, keys(0, 2), 5));

  OfferedMemory memory{.group = "g", .blocks = 100, .segments = {{.bytes = 8}}, .guards = 8};
  memory.network.emplace();
  f.offers.add(kOther, 0, memory, {}, {});
  REQUIRE(f.offer(kOther, 2, 4, {20, 21}));
  CHECK(f.offers.count(std::span(&reader, 1), kSpace, keys(4, 3)) == 2);
  const auto found = f.offers.begin_read(kNode, reader, kSpace, keys(4, 3), 5);
  REQUIRE(found);
  CHECK(found->blocks == std::vector<std::uint32_t>{20, 21});
  CHECK(f.offers.is_read(kOther, job(2)));
  CHECK(f.offers.stats().far_sources == 1);

  // Its connection ends all of its reads.
  f.offers.remove(kNode);
  CHECK_FALSE(f.offers.is_read(kOther, job(2)));
  CHECK(f.offers.stats().reads == 0);
}

/// kWriter's memory needs consent, and kReader has the turn.
struct ConsentFixture : Fixture {
  ConsentFixture() {
    OfferedMemory memory{.group = "g", .blocks = 100, .segments = {{.bytes = 8}}, .guards = 8};
    memory.needs_consent = true;
    memory.network.emplace();
    offers.add(kWriter, 0, memory, {}, {});
    source = offers.source_of(kWriter)->id;
    reader = offers.reader(kReader)->source;
    offers.consents().permitted(source, {}, {}, {});
    REQUIRE(offer(kWriter, 1, 0, {10, 11}));
    CHECK_FALSE(read(0, 2));
    REQUIRE(offers.consents().next(source, {}) == reader);
    offers.consents().permitted(source, reader, {}, {});
  }
  SourceId source{};
  SourceId reader{};
};

TEST_CASE("memory that needs consent is read in a turn, which its reads hold") {
  ConsentFixture f;
  const auto found = f.read(0, 2, 1);
  REQUIRE(found);
  CHECK(found->has_turn);
  CHECK_FALSE(f.read(0, 2, 2, kOther));  // It waits for its turn.
  CHECK_FALSE(f.offers.consents().next(f.source, {}));
  SUBCASE("until the last one has ended") { f.offers.end_read(kReader, 1); }
  SUBCASE("or no longer counts") { f.offers.end_turns(kWriter, job(1)); }
  SUBCASE("or the reader has left") { f.offers.remove(kReader); }
  CHECK(f.offers.consents().next(f.source, {}) == f.offers.reader(kOther)->source);
}

TEST_CASE("a read whose turn was ended does not end that of the next reader") {
  ConsentFixture f;
  REQUIRE(f.read(0, 2, 1));
  CHECK_FALSE(f.read(0, 2, 2, kOther));
  f.offers.end_turns(kWriter, job(1));
  const SourceId other = f.offers.reader(kOther)->source;
  REQUIRE(f.offers.consents().next(f.source, {}) == other);
  f.offers.consents().permitted(f.source, other, {}, {});
  REQUIRE(f.read(0, 2, 2, kOther));
  CHECK_FALSE(f.read(0, 2, 3));  // It waits again.

  f.offers.end_read(kReader, 1);

  CHECK_FALSE(f.offers.consents().next(f.source, {}));
  f.offers.end_read(kOther, 2);
  CHECK(f.offers.consents().next(f.source, {}) == f.reader);
}

TEST_CASE("workers that need no consent, and those of other nodes, neither wait nor hold a turn") {
  ConsentFixture f;
  REQUIRE(f.read(0, 2, 1));
  CHECK_FALSE(f.read(0, 2, 2, kOther));
  constexpr Id128 kPrivileged{3, 3};
  OfferedMemory memory{.group = "g", .blocks = 100, .segments = {{.bytes = 8}}, .guards = 8};
  memory.reads_without_consent = true;
  f.offers.add(kPrivileged, 0, memory, {}, {});
  const auto found = f.read(0, 2, 3, kPrivileged);
  REQUIRE(found);
  CHECK_FALSE(found->has_turn);
  CHECK(f.offers.end_read(kPrivileged, 3));
  constexpr Id128 kNode{7, 7};
  const Offers::Reader there{.group = "g", .shard = 0, .is_there = true};
  REQUIRE(f.offers.begin_read(kNode, there, kSpace, keys(0, 2), 4));
  CHECK(f.offers.end_read(kNode, 4));
  CHECK_FALSE(f.offers.consents().next(f.source, {}));  // kReader still reads.
}

TEST_CASE("reads that wait for a turn do not count as reads") {
  ConsentFixture f;
  REQUIRE(f.read(0, 2, 1));
  for (std::uint64_t pin = 0; pin < 2 * Offers::kMostReads; ++pin) {
    CHECK_FALSE(f.read(0, 2, 100 + pin, kOther));
  }
  f.offers.end_read(kReader, 1);
  const SourceId other = f.offers.reader(kOther)->source;
  REQUIRE(f.offers.consents().next(f.source, {}) == other);
  f.offers.consents().permitted(f.source, other, {}, {});
  CHECK(f.read(0, 2, 1, kOther));
}

}  // namespace
}  // namespace pegaflow::server
