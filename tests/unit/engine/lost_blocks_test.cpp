#include "engine/tables/lost_blocks.h"

#include <random>

#include <doctest/doctest.h>

#include "engine/frames/block_table.h"
#include "engine/namespace_table.h"
#include "tests/support/seed.h"
#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using std::chrono::seconds;
using testing::job;
using testing::keys;
using testing::kProcess;
using testing::StoreFixture;
using testing::token;

constexpr std::uint64_t kGroup = BlockTable::kGroup;

std::uint64_t misses(const StoreFixture& f, Miss why) {
  return f.store->stats().misses[static_cast<std::size_t>(why)];
}

void finish(StoreFixture& f) {
  while (f.store->has_work()) f.store->work();
}

TEST_SUITE("LostBlocks") {
  TEST_CASE("lost blocks are remembered with their reason, and no others") {
    std::mt19937_64 random(testing::seed());
    auto lost = LostBlocks::create(1 << 16);
    REQUIRE(lost);
    std::vector<std::uint64_t> hashes(100);
    for (std::uint64_t& hash : hashes) hash = random();

    for (std::size_t i = 0; i < hashes.size(); ++i) {
      lost->remember(hashes[i], i % 2 == 0 ? Miss::kEvicted : Miss::kSaveFailed);
    }

    // Two of a hundred share a cell once in thirteen runs; the later one has it then.
    std::size_t known = 0;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      const Miss why = lost->why(hashes[i]);
      if (why == Miss::kNew) continue;
      ++known;
      CHECK(why == (i % 2 == 0 ? Miss::kEvicted : Miss::kSaveFailed));
    }
    CHECK(known >= 95);
    for (int i = 0; i < 10'000; ++i) CHECK(lost->why(random()) == Miss::kNew);
    CHECK(lost->why(0) == Miss::kNew);
  }

  TEST_CASE("of as many losses as cells about a third survives as many again") {
    std::mt19937_64 random(testing::seed());
    auto lost = LostBlocks::create(1 << 14);
    REQUIRE(lost);
    std::vector<std::uint64_t> first(1 << 14);
    for (std::uint64_t& hash : first) lost->remember(hash = random(), Miss::kEvicted);
    for (int i = 0; i < 1 << 14; ++i) lost->remember(random(), Miss::kCleaned);

    std::size_t known = 0;
    for (const std::uint64_t hash : first) known += lost->why(hash) == Miss::kEvicted ? 1 : 0;

    // (1 - 1/e) of the cells had one of the first, and 1/e of these were not overwritten: 23 %.
    CHECK(known > (1 << 14) * 20 / 100);
    CHECK(known < (1 << 14) * 27 / 100);
    CHECK(lost->memory_bytes() == 4 << 14);
  }
}

TEST_SUITE("misses of the BlockStore") {
  TEST_CASE("a block that was never saved is new") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage});
    f.save(keys(0, 2));
    CHECK(f.store->lookup(f.space, keys(0, 5)) == 2);
    CHECK(misses(f, Miss::kNew) == 3);
  }

  TEST_CASE("an evicted block is distinguished from a new one behind it") {
    StoreFixture f({.pool_bytes = 4 * testing::kPage});
    f.save(keys(0, 4));
    f.save(keys(100, 3));  // Evicts the end of the chain: blocks 3, 2 and 1.

    CHECK(f.store->lookup(f.space, keys(0, 6)) == 1);

    CHECK(misses(f, Miss::kEvicted) == 3);
    CHECK(misses(f, Miss::kNew) == 2);
  }

  TEST_CASE("a present block behind a missing one is of no use") {
    StoreFixture f({.pool_bytes = 4 * testing::kPage});
    f.save(keys(2, 1));
    CHECK(f.store->lookup(f.space, keys(0, 4)) == 0);
    // The two before it must have been present, too.
    CHECK(misses(f, Miss::kEvicted) == 2);
    CHECK(misses(f, Miss::kBehindHole) == 1);
    CHECK(misses(f, Miss::kNew) == 1);
  }

  TEST_CASE("a block whose save is in progress, and one whose save failed") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage});
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 3)));
    CHECK(f.store->lookup(f.space, keys(0, 3)) == 0);
    CHECK(misses(f, Miss::kBeingSaved) == 3);

    f.store->abandon(f.holder, job(1));
    finish(f);
    CHECK(f.store->lookup(f.space, keys(0, 3)) == 0);
    CHECK(misses(f, Miss::kSaveFailed) == 3);
  }

  TEST_CASE("a save that took too long has failed before its writer is gone") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage});
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 3)));
    f.clock.advance(seconds(31));
    f.store->expire();
    CHECK(f.store->lookup(f.space, keys(0, 3)) == 0);
    CHECK(misses(f, Miss::kSaveFailed) == 3);
  }

  TEST_CASE("a save that got no frame") {
    StoreFixture f({.pool_bytes = 2 * testing::kPage, .instance_share = 1.0, .server_share = 1.0});
    f.save(keys(0, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)));
    REQUIRE(f.store->open(f.holder, token(1), 0, 2, PinId{1}));
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(10, 2)));
    CHECK(f.store->lookup(f.space, keys(10, 2)) == 0);
    CHECK(misses(f, Miss::kNoRoom) == 2);
    f.store->release(f.holder, PinId{1});
    finish(f);
  }

  TEST_CASE("a block whose bytes were wrong, before and after its last pin ended") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage, .instance_share = 1.0, .server_share = 1.0});
    f.save(keys(0, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)));
    REQUIRE(f.store->open(f.holder, token(1), 0, 2, PinId{1}));
    REQUIRE(f.store->invalidate(f.holder, PinId{1}, 0) == true);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 0);
    CHECK(misses(f, Miss::kCorrupt) == 1);
    CHECK(misses(f, Miss::kBehindHole) == 1);

    f.store->release(f.holder, PinId{1});
    f.store->unclaim(f.holder, token(1));
    finish(f);
    CHECK(f.store->lookup(f.space, keys(0, 1)) == 0);
    CHECK(misses(f, Miss::kCorrupt) == 2);
  }

  TEST_CASE("cleaned blocks") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage});
    f.save(keys(0, 3));
    f.store->start_cleanup();
    finish(f);
    CHECK(f.store->lookup(f.space, keys(0, 3)) == 0);
    CHECK(misses(f, Miss::kCleaned) == 3);
  }

  TEST_CASE("blocks that another tier has, and one that it has lost") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage});
    f.save(keys(0, 2));
    f.save(keys(6, 1));
    f.store->note_lost(f.space, keys(5, 1)[0], Miss::kDiskFailed);

    f.store->note_lookup(f.space, keys(0, 8), 2, 3);

    CHECK(misses(f, Miss::kOtherTier) == 3);
    CHECK(misses(f, Miss::kDiskFailed) == 1);
    CHECK(misses(f, Miss::kBehindHole) == 1);
    CHECK(misses(f, Miss::kNew) == 1);
    CHECK(f.store->stats().lookup_hits == 2);
    CHECK(f.store->stats().lookup_misses == 6);
  }

  TEST_CASE("blocks of the generation before a reset, and of an ended namespace") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage});
    f.save(keys(0, 3));
    f.store->retire_space(f.space);
    finish(f);
    CHECK(f.store->lookup(f.space, keys(0, 3)) == 0);
    CHECK(misses(f, Miss::kReset) == 3);

    const SpaceId next = f.store->make_space(f.shape, f.space);
    CHECK(f.store->lookup(next, keys(0, 4)) == 0);
    CHECK(misses(f, Miss::kReset) == 6);
    CHECK(misses(f, Miss::kNew) == 1);
    // Another namespace with the same keys never had them.
    CHECK(f.store->lookup(f.store->make_space(f.shape), keys(0, 3)) == 0);
    CHECK(misses(f, Miss::kNew) == 4);
  }

  TEST_CASE("a namespace's blocks are remembered through its reset") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage});
    NamespaceTable namespaces(*f.store);
    const auto entered = namespaces.enter({{"model", "tiny"}});
    REQUIRE(entered);
    const NamespaceId id = (*entered)->id;
    REQUIRE(namespaces.fix_shapes(id, {}, std::vector<Shape>{{{{.page_bytes = testing::kPage}}}}));
    const JobId saved{kProcess, 1};
    REQUIRE(f.store->reserve(f.holder, (*entered)->space(), saved, 0, keys(0, 3)));
    REQUIRE(f.store->publish(f.holder, saved) == 0);

    namespaces.reset(id);
    finish(f);

    CHECK(f.store->lookup(namespaces.find(id)->space(), keys(0, 3)) == 0);
    CHECK(misses(f, Miss::kReset) == 3);
  }

  TEST_CASE("the search for reasons ends a group of blocks behind the last known one") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage});
    f.save(keys(kGroup * 2, 1));
    CHECK(f.store->lookup(f.space, keys(0, kGroup * 2 + 1)) == 0);
    CHECK(misses(f, Miss::kNew) == kGroup * 2 + 1);
    CHECK(misses(f, Miss::kBehindHole) == 0);
  }
}

TEST_SUITE("ages of the BlockStore") {
  TEST_CASE("an evicted block had an age since its seal and since its last use") {
    StoreFixture f({.pool_bytes = 2 * testing::kPage});
    f.save(keys(0, 1));
    f.save(keys(10, 1));
    f.clock.advance(seconds(100));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 1), token(1)));
    f.store->unclaim(f.holder, token(1));
    finish(f);
    f.clock.advance(seconds(20));
    CHECK(f.store->next_victim_idle_s() == 120);

    f.save(keys(20, 2));  // First the one that was not used, then the other.

    const BlockStore::Stats stats = f.store->stats();
    CHECK(stats.evicted_age.sum_seconds == 240);
    CHECK(stats.evicted_idle.sum_seconds == 140);
    CHECK(stats.evicted_idle.counts[2] == 1);  // 10 to 60 s.
    CHECK(stats.evicted_idle.counts[3] == 1);  // 60 to 300 s.
    CHECK(f.store->next_victim_idle_s() == 0);
  }

  TEST_CASE("among several sizes the block that has been evictable for longest is next") {
    StoreFixture f({.pool_bytes = 64 * testing::kPage});
    const SpaceId small = f.space;
    const SpaceId large = f.store->make_space(f.add_shape(4 * testing::kPage));
    f.save(keys(0, 1));
    f.clock.advance(seconds(10));
    f.space = large;
    f.save(keys(1, 1));
    f.clock.advance(seconds(5));
    CHECK(f.store->next_victim_idle_s() == 15);

    f.store->retire_space(small);
    finish(f);

    CHECK(f.store->next_victim_idle_s() == 5);
  }

  TEST_CASE("a frame that is returned late records nothing for a key that has moved on") {
    StoreFixture f({.pool_bytes = 8 * testing::kPage});
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 1)));
    f.store->holder_lost(f.holder);
    // Another holder saves the block while the lost one may still write its frame.
    REQUIRE(f.store->reserve(f.other, f.space, job(2), 0, keys(0, 1))->front() != kNoFrame);
    REQUIRE(f.store->publish(f.other, job(2)) == 0);
    f.store->start_cleanup();
    finish(f);

    f.store->holder_gone(f.holder);
    finish(f);

    CHECK(f.store->stats().used_bytes == 0);
    CHECK(f.store->lookup(f.space, keys(0, 1)) == 0);
    CHECK(misses(f, Miss::kCleaned) == 1);
  }

  TEST_CASE("a block whose extent is leaving is evicted already") {
    StoreFixture f({.pool_bytes = 256 * testing::kPage, .slice_blocks = 1});
    f.save(keys(0, 256));
    finish(f);
    const SpaceId large = f.store->make_space(f.add_shape(64 * testing::kPage));
    // One step a call: the leaving extents take a while.
    REQUIRE(f.store->reserve(f.holder, large, job(1), 0, keys(0, 1))->front() == kNoFrame);
    REQUIRE(f.store->has_work());
    // Each key alone, so that none lies behind another.
    std::uint64_t missing = 0;
    for (std::uint64_t i = 0; i < 256; ++i) missing += 1 - f.store->lookup(f.space, keys(i, 1));

    CHECK(missing > 1);  // The one that was freed, and those that wait for it.
    CHECK(misses(f, Miss::kEvicted) == missing);
    CHECK(misses(f, Miss::kBehindHole) == 0);
  }

  TEST_CASE("blocks of a cleanup and of a reset are counted apart") {
    StoreFixture f({.pool_bytes = 4 * testing::kPage});
    f.save(keys(0, 1));
    f.clock.advance(seconds(50));
    f.store->start_cleanup();
    finish(f);
    f.save(keys(1, 1));
    f.clock.advance(seconds(7));
    f.store->retire_space(f.space);
    finish(f);

    CHECK(f.store->stats().dropped_age.sum_seconds == 57);
    CHECK(f.store->stats().evicted_age.sum_seconds == 0);
    CHECK_FALSE(f.store->next_victim_idle_s());
  }

  TEST_CASE("an age beyond all bounds is in the last bucket") {
    AgeHistogram ages;
    ages.record(604'801);
    ages.record(0);
    CHECK(ages.counts.back() == 1);
    CHECK(ages.counts.front() == 1);
  }
}

}  // namespace
}  // namespace pegaflow::engine
