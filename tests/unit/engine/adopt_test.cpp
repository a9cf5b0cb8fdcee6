// A store continues with the rows that another one left: BlockStore::adopt().
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "engine/frames/checksum_table.h"
#include "engine/kept/kept_tables.h"
#include "engine/namespace_table.h"
#include "tests/support/kept_copy.h"
#include "tests/support/mapping_flags.h"
#include "tests/support/seed.h"
#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using testing::code_of;
using testing::job;
using testing::keys;
using testing::kPage;
using testing::StoreFixture;
using testing::token;

constexpr std::uint64_t kFrames = 64;

KeptTables tables_of(std::uint64_t frames, const Clock& clock) {
  auto made = KeptTables::create({.pool = {7, 7}, .pool_bytes = frames * kPage}, clock);
  REQUIRE(made);
  return std::move(*made);
}

/// The same memory, mapped once more.
KeptTables again(const KeptTables& tables) {
  auto opened = KeptTables::open(UniqueFd(::fcntl(tables.fd(), F_DUPFD_CLOEXEC, 0)));
  REQUIRE(opened);
  return std::move(*opened);
}

/// Memory with the bytes that these tables have now: what a process leaves that dies here.
KeptTables left_by(const KeptTables& tables) {
  auto opened = KeptTables::open(testing::copy_of(tables.fd()));
  REQUIRE(opened);
  return std::move(*opened);
}

BlockStore::Options options_of(KeptTables& tables, EvictionKind eviction = EvictionKind::kLru) {
  auto options = testing::pool_of(tables.layout().pool_bytes / kPage);
  options.kept = &tables;
  options.eviction = eviction;
  return options;
}

/// A store of its own, as another process would have it.
struct Successor {
  explicit Successor(const KeptTables& former, EvictionKind eviction = EvictionKind::kLru)
      : tables(left_by(former)) {
    start(eviction);
  }
  /// Continues with tables that no other store uses any longer.
  explicit Successor(KeptTables&& left) : tables(std::move(left)) { start(EvictionKind::kLru); }
  void start(EvictionKind eviction) {
    auto made = BlockStore::create(options_of(tables, eviction), clock);
    REQUIRE(made);
    store = std::move(*made);
  }
  ~Successor() {
    if (store == nullptr) return;
    const auto checked = store->check();
    CHECK_MESSAGE(checked.has_value(), (checked ? "" : checked.error().detail));
  }
  /// Adopts one shape and generations of it.
  BlockStore::Adopted adopt(const std::vector<SpaceId>& spaces) {
    std::vector<BlockStore::FormerSpace> live;
    for (const SpaceId space : spaces) live.push_back({space, 0});
    const BlockStore::FormerShape shape{0, Shape{{{.page_bytes = kPage}}}};
    auto adopted = store->adopt(std::span(&shape, 1), live);
    REQUIRE(adopted);
    while (store->work()) {
    }
    return *adopted;
  }
  /// Frames that a save of as many new blocks as possible gets.
  std::vector<FrameIndex> all_free(SpaceId space) {
    const HolderId filler = store->add_holder(9, Id128{9, 9});
    auto frames = store->reserve(filler, space, JobId{{9, 9}, 1}, 0, keys(1'000'000, kFrames));
    REQUIRE(frames);
    std::erase(*frames, kNoFrame);
    return *frames;
  }

  ManualClock clock;
  KeptTables tables;
  std::unique_ptr<BlockStore> store;
};

/// Requests for single blocks, of which some are far more popular; loads what there is, saves the
/// rest.
struct Requests {
  explicit Requests(std::uint64_t seed) : random(seed) {}
  /// For each request, whether the block was found.
  std::vector<bool> send(BlockStore& store, HolderId holder, SpaceId space, int count) {
    std::vector<bool> found;
    for (int i = 0; i < count; ++i) {
      const double draw = std::uniform_real_distribution<double>(0, 1)(random);
      const auto wanted = keys(static_cast<std::uint64_t>(draw * draw * draw * 400), 1);
      ++number;
      found.push_back(store.lookup(space, wanted) == 1);
      if (found.back()) {
        REQUIRE(store.claim(holder, space, wanted, token(number)) == 1);
        store.unclaim(holder, token(number));
        continue;
      }
      const auto frames = store.reserve(holder, space, job(number), 0, wanted);
      REQUIRE(frames);
      if (frames->front() == kNoFrame) {
        store.abandon(holder, job(number));
      } else {
        REQUIRE(store.publish(holder, job(number)) == 0);
      }
      while (store.work()) {
      }
    }
    return found;
  }
  std::mt19937_64 random;
  std::uint64_t number = 0;
};

bool contains(const std::vector<FrameIndex>& frames, FrameIndex frame) {
  return std::find(frames.begin(), frames.end(), frame) != frames.end();
}

TEST_SUITE("BlockStore, adoption") {
  TEST_CASE("sealed blocks are found again in their frames, and free frames are free") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    StoreFixture f(options_of(tables));
    const auto frames = f.save(keys(0, 5));

    Successor next(tables);
    const auto adopted = next.adopt({f.space});

    CHECK(adopted.blocks == 5);
    CHECK(adopted.bytes == 5 * kPage);
    CHECK(adopted.held == 0);
    CHECK(adopted.discarded == 0);
    CHECK_FALSE(adopted.former);
    CHECK(next.store->lookup(f.space, keys(0, 6)) == 5);
    const HolderId reader = next.store->add_holder(1, testing::kProcess);
    REQUIRE(next.store->claim(reader, f.space, keys(0, 5), token(1)) == 5);
    const auto pages = next.store->open(reader, token(1), 0, 5, PinId{1});
    REQUIRE(pages);
    CHECK(pages->frames == frames);
    CHECK(pages->by_this_process == 5);  // A writer keeps its mark.
    next.store->holder_gone(reader);
    CHECK(next.store->stats().used_bytes == 5 * kPage);
  }

  TEST_CASE("blocks are evicted in the order in which the former process would have") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    StoreFixture f(options_of(tables));
    for (std::uint64_t i = 0; i < kFrames; ++i) f.save(keys(i, 1));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 1), token(1)) == 1);
    f.store->unclaim(f.holder, token(1));  // The oldest one is used again.

    Successor next(tables);
    next.adopt({f.space});
    const HolderId writer = next.store->add_holder(1, testing::kProcess);
    REQUIRE(next.store->reserve(writer, f.space, job(1), 0, keys(500, 1)));

    CHECK(next.store->lookup(f.space, keys(0, 1)) == 1);
    CHECK(next.store->lookup(f.space, keys(1, 1)) == 0);
    CHECK(next.store->lookup(f.space, keys(2, 1)) == 1);
    next.store->abandon(writer, job(1));
  }

  TEST_CASE("a block that was used often stays as long as the former process would have kept it") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    StoreFixture f(options_of(tables, EvictionKind::kWeightedLru));
    for (std::uint64_t i = 0; i < kFrames; ++i) f.save(keys(i, 1));
    const auto use = [&](std::uint64_t number) {
      REQUIRE(f.store->claim(f.holder, f.space, keys(number, 1), token(1)) == 1);
      f.store->unclaim(f.holder, token(1));
    };
    for (int i = 0; i < 4; ++i) use(0);
    for (std::uint64_t i = 1; i < kFrames; ++i) use(i);  // Block 0 is the oldest one now.

    const auto survives_a_save = [&](BlockStore& store, HolderId writer) {
      REQUIRE(store.reserve(writer, f.space, job(900), 0, keys(500, 1)));
      return store.lookup(f.space, keys(0, 1)) == 1 && store.lookup(f.space, keys(1, 1)) == 0;
    };
    Successor next(tables, EvictionKind::kWeightedLru);
    next.adopt({f.space});
    CHECK(survives_a_save(*next.store, next.store->add_holder(1, testing::kProcess)));
    CHECK(survives_a_save(*f.store, f.holder));
  }

  TEST_CASE("the requests after the end find the same blocks as if the process had gone on") {
    for (const EvictionKind kind :
         {EvictionKind::kLru, EvictionKind::kWeightedLru, EvictionKind::kAdaptive}) {
      CAPTURE(to_string(kind));
      ManualClock clock;
      KeptTables tables = tables_of(kFrames, clock);
      StoreFixture f(options_of(tables, kind));
      Requests requests(testing::seed());
      requests.send(*f.store, f.holder, f.space, 4'000);

      Successor next(tables, kind);
      next.adopt({f.space});
      const HolderId holder = next.store->add_holder(1, testing::kProcess);
      Requests same = requests;
      const auto found = same.send(*next.store, holder, f.space, 4'000);
      CHECK(found == requests.send(*f.store, f.holder, f.space, 4'000));
    }
  }

  TEST_CASE("the tables are not part of a core dump, which would allocate all of them") {
    ManualClock clock;
    const KeptTables tables = tables_of(kFrames, clock);
    CHECK(testing::flags_of_mapping(tables.policy(0).data()).find(" dd ") != std::string::npos);
  }

  TEST_CASE("a new shape remembers nothing of a former one with its number") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
    const auto memory = tables.policy(0);
    { StoreFixture f(options_of(tables, EvictionKind::kS3Fifo)); }
    // The owner stays, so that only the new shape is a reason to clear the rest.
    std::fill(memory.begin() + 4096, memory.end(), std::byte{1});
    {
      StoreFixture f(options_of(tables, EvictionKind::kS3Fifo));
      CHECK(std::all_of(memory.begin() + 4096, memory.end(), is_zero));
    }
    CHECK_FALSE(is_zero(memory[0]));  // Its owner, by which another kind is recognized.
  }

  TEST_CASE("a policy of another kind begins with an empty memory") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    StoreFixture f(options_of(tables, EvictionKind::kWeightedLru));
    Requests requests(testing::seed());
    requests.send(*f.store, f.holder, f.space, 1'000);

    const auto is_empty = [](const KeptTables& of) {
      const auto memory = of.policy(0).subspan(4096);  // Without its owner.
      return std::all_of(memory.begin(), memory.end(),
                         [](std::byte byte) { return byte == std::byte{0}; });
    };
    REQUIRE_FALSE(is_empty(tables));

    Successor next(tables, EvictionKind::kLru);  // It keeps nothing.
    CHECK(next.adopt({f.space}).blocks == kFrames);
    CHECK(is_empty(next.tables));
    const HolderId holder = next.store->add_holder(1, testing::kProcess);
    const auto found = requests.send(*next.store, holder, f.space, 4'000);
    CHECK(std::count(found.begin(), found.end(), true) > 1'000);
  }

  TEST_CASE("a frame that a client may still write or read is not reused before it has quiesced") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    StoreFixture f(options_of(tables));
    const auto read = f.save(keys(0, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    REQUIRE(f.store->open(f.holder, token(1), 0, 2, PinId{1}));
    const auto written = f.store->reserve(f.other, f.space, job(2), 0, keys(10, 3)).value();

    Successor next(tables);
    const auto adopted = next.adopt({f.space});
    CHECK(adopted.held == 5);
    CHECK(adopted.blocks == 2);
    CHECK(adopted.discarded == 3);
    REQUIRE(adopted.former);
    CHECK(next.store->may_touch(*adopted.former));
    CHECK(next.store->lookup(f.space, keys(0, 2)) == 2);
    CHECK(next.store->lookup(f.space, keys(10, 3)) == 0);
    const auto free = next.all_free(f.space);
    CHECK(free.size() == kFrames - 5);
    for (const FrameIndex frame : read) CHECK_FALSE(contains(free, frame));
    for (const FrameIndex frame : written) CHECK_FALSE(contains(free, frame));

    next.store->holder_gone(*adopted.former);
    while (next.store->work()) {
    }
    CHECK(next.store->lookup(f.space, keys(0, 2)) == 2);
    CHECK(next.store->stats().sealed == 2);
    CHECK(next.store->stats().pinned_by_lost_readers == 0);
  }

  TEST_CASE("a process that adopts and dies leaves the same to the next one") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    StoreFixture f(options_of(tables));
    f.save(keys(0, 4));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    REQUIRE(f.store->open(f.holder, token(1), 0, 2, PinId{1}));
    REQUIRE(f.store->reserve(f.other, f.space, job(2), 0, keys(10, 3)));
    Successor dies(tables);
    const auto first = dies.adopt({f.space});

    dies.store.reset();
    Successor next(std::move(dies.tables));
    const auto second = next.adopt({f.space});

    CHECK(second.blocks == first.blocks);
    CHECK(second.held == first.held);
    CHECK(second.discarded == first.discarded);
  }

  TEST_CASE("blocks of a generation that is not recorded are gone, and their frames free") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    StoreFixture f(options_of(tables));
    f.save(keys(0, 4));
    const SpaceId other = f.store->make_space(f.shape);
    const SpaceId former = std::exchange(f.space, other);
    f.save(keys(0, 3));

    Successor next(tables);
    const auto adopted = next.adopt({other});

    CHECK(adopted.blocks == 3);
    CHECK(adopted.discarded == 4);
    CHECK(adopted.held == 0);
    CHECK(next.store->lookup(other, keys(0, 4)) == 3);
    CHECK(next.store->lookup(former, keys(0, 4)) == 0);
    CHECK(next.store->stats().used_bytes == 3 * kPage);
    // The ids of generations that were used are not given out again.
    CHECK(static_cast<std::uint32_t>(next.store->make_space(f.shape)) >
          static_cast<std::uint32_t>(other));
  }

  TEST_CASE("a block that was invalidated, and one whose row changed, are not found") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    StoreFixture f(options_of(tables));
    const auto frames = f.save(keys(0, 3));
    REQUIRE(f.store->claim(f.holder, f.space, keys(1, 1), token(1)) == 1);
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    REQUIRE(f.store->invalidate(f.holder, PinId{1}, 0) == true);
    KeptTables left = left_by(tables);
    SUBCASE("another key") { left.rows()[frames[2]].key.bytes[7] ^= std::byte{1}; }
    SUBCASE("another generation") { left.rows()[frames[2]].space = SpaceId{4711}; }
    SUBCASE("another proof") { left.proofs()[frames[2]] ^= 1; }

    Successor next(left);
    const auto adopted = next.adopt({f.space, SpaceId{4711}});

    CHECK(adopted.blocks == 1);
    CHECK(adopted.discarded == 2);
    CHECK(next.store->lookup(f.space, keys(0, 3)) == 1);
    CHECK(next.store->lookup(f.space, keys(2, 1)) == 0);
    if (adopted.former) next.store->holder_gone(*adopted.former);
  }

  TEST_CASE("extents that contradict the record or each other are an error") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    StoreFixture f(options_of(tables));
    f.save(keys(0, 3));
    KeptTables left = left_by(tables);
    std::uint32_t shape = 0;
    SUBCASE("a shape that is not recorded") { shape = 1; }
    SUBCASE("a damaged member") { left.extents()[0].frames += 1; }
    SUBCASE("more frames than it has") { left.extents()[0].touched = 1000; }
    SUBCASE("units of another extent") {
      KeptExtent second = left.extents()[0];
      second.serial = 99;
      left.set_extent(1, second);
    }
    auto made = BlockStore::create(options_of(left), clock);
    REQUIRE(made);
    const BlockStore::FormerShape known{shape, Shape{{{.page_bytes = kPage}}}};

    const auto adopted = (*made)->adopt(std::span(&known, 1), {});

    CHECK(code_of(adopted) == Errc::kCorrupt);
  }

  TEST_CASE("pages keep the checksums of their writers") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    ChecksumTable checksums(kFrames, &tables);
    CHECK(checksums.is_empty());
    checksums.set(3, 0xABCD);
    const KeptTables other = again(tables);
    const ChecksumTable next(kFrames, &other);
    CHECK_FALSE(next.is_empty());
    CHECK(next[3] == 0xABCD);
    CHECK(next[4] == ChecksumTable::kNone);
  }

  TEST_CASE("namespaces are found by their factors, with their generation and blocks") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    StoreFixture f(options_of(tables));
    f.save(keys(0, 3));
    Successor next(tables);
    next.adopt({f.space});
    NamespaceTable names(*next.store);
    const Shape shape{{{.page_bytes = kPage}}};
    REQUIRE(names.restore({{.factors = {{"model", "a"}},
                            .rules = {},
                            .kinds = {{shape, f.space}},
                            .generation = 3}}));
    int changes = 0;
    names.on_change([&] { ++changes; });

    const auto entered = names.enter({{"model", "a"}});

    REQUIRE(entered);
    CHECK((*entered)->space() == f.space);
    CHECK((*entered)->generation == 3);
    CHECK(changes == 0);
    names.reset((*entered)->id);
    CHECK(changes == 1);
    CHECK(next.store->lookup((*entered)->space(), keys(0, 3)) == 0);
    while (next.store->work()) {
    }
  }
}

TEST_SUITE("KeptTables") {
  TEST_CASE("a record is the last one that was written whole") {
    ManualClock clock;
    KeptTables tables = tables_of(kFrames, clock);
    using Record = KeptTables::Record;
    const auto text = [](std::string_view words) {
      const auto bytes = std::as_bytes(std::span(words));
      return std::vector<std::byte>(bytes.begin(), bytes.end());
    };
    CHECK_FALSE(tables.read(Record::kNames));
    REQUIRE(tables.write(Record::kNames, text("first")));
    REQUIRE(tables.write(Record::kNames, text("second, which is longer")));
    CHECK(tables.read(Record::kNames) == text("second, which is longer"));
    CHECK_FALSE(tables.read(Record::kDisks));
    REQUIRE(tables.write(Record::kNames, {}));
    CHECK(again(tables).read(Record::kNames) == std::vector<std::byte>());
    const std::vector<std::byte> large(KeptTables::kMaxRecordBytes);
    CHECK(code_of(tables.write(Record::kNames, large)) == Errc::kOutOfCapacity);
  }

  TEST_CASE("memory without a table, or with one of another format, is refused") {
    CHECK(code_of(KeptTables::open(UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)))) ==
          Errc::kCorrupt);
    const int other = ::memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(::ftruncate(other, 1 << 20) == 0);
    REQUIRE(::fcntl(other, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK(code_of(KeptTables::open(UniqueFd(other))) == Errc::kCorrupt);
    ManualClock clock;
    const KeptTables tables = tables_of(kFrames, clock);
    const std::uint32_t later = KeptTables::kFormat + 1;
    REQUIRE(::pwrite(tables.fd(), &later, sizeof later, 8) == sizeof later);
    CHECK(code_of(KeptTables::open(UniqueFd(::fcntl(tables.fd(), F_DUPFD_CLOEXEC, 0)))) ==
          Errc::kRefused);
  }
}

}  // namespace
}  // namespace pegaflow::engine
