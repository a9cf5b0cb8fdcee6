// Blocks that arrive from another node: BlockStore::fetch() and the ends of a fetch.
#include <algorithm>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using testing::code_of;
using testing::job;
using testing::keys;
using testing::kPage;
using testing::pool_of;
using testing::StoreFixture;
using testing::token;

std::vector<FrameIndex> frames_of(const BlockStore::Fetch& made) {
  std::vector<FrameIndex> frames;
  for (const auto& each : made.frames) frames.push_back(each.frame);
  return frames;
}

TEST_SUITE("BlockStore, fetches") {
  TEST_CASE(
      "a claim holds present blocks and blocks in flight, and opens each once it is present") {
    StoreFixture f(pool_of(8));
    f.save(keys(0, 2));
    f.save(keys(3, 1));  // After a missing block.

    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 6), 5).value();

    CHECK(made.blocks == 5);  // The sixth is missing everywhere.
    CHECK(made.in_flight == 2);
    REQUIRE(made.frames.size() == 2);
    CHECK(made.frames[0].place == 2);
    CHECK(made.frames[1].place == 4);
    CHECK(f.store->stats().in_flight == 2);
    CHECK(f.store->stats().fetch_bytes == 2 * kPage);
    CHECK(f.store->lookup(f.space, keys(0, 6)) == 2);
    CHECK(f.store->arrived(token(1), 0, 5) == 2);
    CHECK(f.store->arrived(token(1), 2, 3) == 0);
    CHECK(f.store->open(f.holder, token(1), 0, 2, PinId{1}));
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 3, PinId{2})) == Errc::kBusy);

    CHECK(f.store->fetched(made.frames[0].frame));

    CHECK(f.store->arrived(token(1), 0, 5) == 4);
    CHECK(f.store->lookup(f.space, keys(0, 6)) == 4);
    CHECK(f.store->fetched(made.frames[1].frame));
    CHECK(f.store->arrived(token(1), 4, 1) == 1);
    const auto pages = f.store->open(f.holder, token(1), 0, 5, PinId{2}).value();
    CHECK(pages.frames[2] == made.frames[0].frame);
    CHECK(pages.by_this_process == 3);
    CHECK(f.store->stats().replicas == 2);
    CHECK(f.store->stats().fetched == 2);
    CHECK(f.store->stats().insertions == 3);
  }

  TEST_CASE("a second claim joins, and no block is fetched twice") {
    StoreFixture f(pool_of(8));
    const auto first = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 3), 3).value();

    const auto joined = f.store->fetch(f.other, f.space, token(2), 0, keys(0, 4), 0).value();

    CHECK(joined.blocks == 3);
    CHECK(joined.in_flight == 3);
    CHECK(joined.frames.empty());
    CHECK(f.store->stats().fetches_joined == 3);
    const auto more = f.store->fetch(f.other, f.space, token(2), 3, keys(3, 1), 1).value();
    CHECK(more.blocks == 1);
    CHECK(more.frames.size() == 1);
    for (const FrameIndex frame : frames_of(first)) CHECK(f.store->fetched(frame));
    CHECK(f.store->open(f.holder, token(1), 0, 3, PinId{1}));
    CHECK(f.store->open(f.other, token(2), 0, 3, PinId{1}));
    f.store->quiesced(more.frames[0].frame);
  }

  TEST_CASE("an existing claim gets longer") {
    StoreFixture f(pool_of(8));
    f.save(keys(0, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 3), token(1)) == 2);

    const auto made = f.store->fetch(f.holder, f.space, token(1), 2, keys(2, 1), 1).value();

    REQUIRE(made.frames.size() == 1);
    REQUIRE(f.store->fetched(made.frames[0].frame));
    CHECK(f.store->open(f.holder, token(1), 0, 3, PinId{1}).value().frames.size() == 3);
    CHECK(f.store->stats().claims == 1);
    f.store->release(f.holder, PinId{1});
    f.store->unclaim(f.holder, token(1));
    CHECK(f.store->is_idle());
    CHECK(f.store->stats().sealed == 3);
  }

  TEST_CASE("a fetch without a result makes no claim") {
    StoreFixture f(pool_of(8));
    CHECK(f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 2), 0).value().blocks == 0);
    CHECK(f.store->fetch(f.holder, SpaceId{77}, token(1), 0, keys(0, 2), 2).value().blocks == 0);
    CHECK(f.store->stats().claims == 0);
    CHECK(code_of(f.store->arrived(token(1), 0, 1)) == Errc::kGone);
  }

  TEST_CASE("a fetch needs a claim of this holder and generation") {
    auto options = pool_of(8);
    options.max_claims = 1;
    StoreFixture f(options);
    const auto fetch = [&](HolderId holder, SpaceId space, Id128 name, std::size_t first) {
      return code_of(f.store->fetch(holder, space, name, first, keys(5, 1), 1));
    };
    CHECK(fetch(HolderId{99}, f.space, token(1), 0) == Errc::kGone);
    CHECK(fetch(f.holder, f.space, token(1), 1) == Errc::kGone);
    CHECK(fetch(f.holder, f.space, Id128{}, 0) == Errc::kInvalidArgument);
    f.save(keys(0, 1));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 1), token(1)) == 1);
    CHECK(fetch(f.holder, f.space, token(2), 0) == Errc::kBusy);
    CHECK(fetch(f.holder, f.space, token(1), 0) == Errc::kInvalidArgument);
    CHECK(fetch(f.other, f.space, token(1), 1) == Errc::kInvalidArgument);
    CHECK(fetch(f.holder, f.store->make_space(f.shape), token(1), 1) == Errc::kInvalidArgument);
    f.store->holder_lost(f.other);
    CHECK(fetch(f.other, f.space, token(1), 1) == Errc::kGone);
    f.store->unclaim(f.holder, token(1));
    CHECK(fetch(f.holder, f.space, token(1), 1) == Errc::kGone);
  }

  TEST_CASE("arrived() refuses a range that the claim does not have") {
    StoreFixture f(pool_of(8));
    f.save(keys(0, 2));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    CHECK(code_of(f.store->arrived(token(1), 0, 0)) == Errc::kInvalidArgument);
    CHECK(code_of(f.store->arrived(token(1), 0, 3)) == Errc::kInvalidArgument);
    CHECK(code_of(f.store->arrived(token(1), 2, 1)) == Errc::kInvalidArgument);
    REQUIRE(f.store->open(f.holder, token(1), 0, 2, PinId{1}));
    REQUIRE(f.store->invalidate(f.holder, PinId{1}, 1) == true);
    CHECK(f.store->arrived(token(1), 0, 2) == 1);
    CHECK(code_of(f.store->arrived(token(1), 1, 1)) == Errc::kGone);
  }

  TEST_CASE("a frame that was given up waits until nothing can write to it") {
    StoreFixture f(pool_of(4));
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 1), 1).value();
    const FrameIndex old = made.frames[0].frame;

    f.store->give_up(old);
    f.store->give_up(old);

    CHECK(f.store->stats().in_flight == 0);
    CHECK(f.store->stats().quarantined_fetch == 1);
    CHECK(f.store->stats().quarantined_bytes == kPage);
    CHECK(f.store->stats().fetches_given_up == 1);
    CHECK(code_of(f.store->arrived(token(1), 0, 1)) == Errc::kGone);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 1, PinId{1})) == Errc::kGone);
    // The key may be fetched, or saved, into another frame at once.
    const auto again = f.store->fetch(f.other, f.space, token(2), 0, keys(0, 1), 1).value();
    REQUIRE(again.frames.size() == 1);
    CHECK(again.frames[0].frame != old);
    f.store->unclaim(f.holder, token(1));
    CHECK(f.free() == 2);

    f.store->quiesced(old);

    CHECK(f.free() == 3);
    CHECK(f.store->stats().quarantined_fetch == 0);
    CHECK(f.store->fetched(again.frames[0].frame));
    CHECK(f.store->lookup(f.space, keys(0, 1)) == 1);
  }

  TEST_CASE("a quiesced frame waits for the claims that counted on it") {
    StoreFixture f(pool_of(4));
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 2), 2).value();

    f.store->quiesced(made.frames[0].frame);

    CHECK(f.store->stats().quarantined_fetch == 1);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 1, PinId{1})) == Errc::kGone);
    f.store->unclaim(f.holder, token(1));
    CHECK(f.free() == 3);
    CHECK(f.store->fetched(made.frames[1].frame));  // No claim waits; it is sealed all the same.
    CHECK(f.store->is_idle());
    CHECK(f.store->lookup(f.space, keys(1, 1)) == 1);
  }

  TEST_CASE("bytes that arrive too late seal nothing") {
    StoreFixture f(pool_of(4));
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 2), 2).value();
    f.store->give_up(made.frames[0].frame);
    f.store->retire_space(f.space);
    while (f.store->work()) {
    }

    CHECK_FALSE(f.store->fetched(made.frames[0].frame));
    CHECK_FALSE(f.store->fetched(made.frames[1].frame));

    CHECK(f.free() == 4);
    CHECK(f.store->stats().fetched == 0);
    CHECK(f.store->stats().fetches_given_up == 2);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 1, PinId{1})) == Errc::kGone);
  }

  TEST_CASE("a block in flight is not saved, and a block being saved is not fetched") {
    StoreFixture f(pool_of(8));
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 1), 1).value();
    const auto frames = f.store->reserve(f.other, f.space, job(1), 0, keys(0, 2)).value();
    CHECK(frames[0] == kNoFrame);
    CHECK(frames[1] != kNoFrame);

    CHECK(f.store->fetch(f.holder, f.space, token(1), 1, keys(1, 1), 1).value().blocks == 0);

    REQUIRE(f.store->publish(f.other, job(1)) == 0);
    CHECK(f.store->fetch(f.holder, f.space, token(1), 1, keys(1, 1), 1).value().blocks == 1);
    CHECK(f.store->fetched(made.frames[0].frame));
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
  }

  TEST_CASE("a key of a forgotten save may be fetched, into another frame") {
    StoreFixture f(pool_of(8));
    const auto frames = f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 1)).value();
    f.store->holder_lost(f.holder);

    const auto made = f.store->fetch(f.other, f.space, token(1), 0, keys(0, 1), 1).value();

    REQUIRE(made.frames.size() == 1);
    CHECK(made.frames[0].frame != frames[0]);
    CHECK(f.store->fetched(made.frames[0].frame));
    f.store->holder_gone(f.holder);
    CHECK(f.store->lookup(f.space, keys(0, 1)) == 1);
    CHECK(f.free() == 7);
  }

  TEST_CASE("fetches have a share of the pool, given-up frames included") {
    auto options = pool_of(8);
    options.fetch_share = 0.25;
    StoreFixture f(options);
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 4), 4).value();
    REQUIRE(made.frames.size() == 2);
    CHECK(made.blocks == 2);
    CHECK(f.store->stats().fetches_no_room == 1);
    f.store->give_up(made.frames[0].frame);
    CHECK(f.store->fetch(f.other, f.space, token(2), 0, keys(4, 1), 1).value().blocks == 0);
    f.store->quiesced(made.frames[0].frame);
    CHECK(f.store->fetch(f.other, f.space, token(2), 0, keys(4, 1), 1).value().blocks == 0);

    f.store->unclaim(f.holder, token(1));

    const auto next = f.store->fetch(f.other, f.space, token(2), 0, keys(4, 2), 2).value();
    REQUIRE(next.blocks == 1);
    f.store->quiesced(next.frames[0].frame);
    f.store->quiesced(made.frames[1].frame);
  }

  TEST_CASE("fetches leave room for saves") {
    auto options = pool_of(20);
    options.save_reserve = 0.1;
    StoreFixture f(options);
    f.save(keys(0, 15));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 15), token(1)) == 15);

    const auto made = f.store->fetch(f.other, f.space, token(2), 0, keys(20, 8), 8).value();

    CHECK(made.frames.size() == 3);  // 18 of 20 cannot be freed now.
    const auto frames = f.store->reserve(f.other, f.space, job(1), 0, keys(40, 2)).value();
    CHECK(std::count(frames.begin(), frames.end(), kNoFrame) == 0);
    CHECK(f.store->stats().claims_revoked == 0);
    f.store->abandon(f.other, job(1));
    for (const FrameIndex frame : frames_of(made)) f.store->quiesced(frame);
  }

  TEST_CASE("a fetch evicts evictable blocks, never those of a claim, not even its own") {
    StoreFixture f(pool_of(4));
    f.save(keys(0, 1));
    f.save(keys(10, 1));
    f.save(keys(2, 1));
    f.save(keys(20, 1));
    REQUIRE(f.store->claim(f.other, f.space, keys(20, 1), token(2)) == 1);
    f.clock.advance(std::chrono::seconds(5));

    // The first and the third are present, and the oldest; only the tenth may be evicted.
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 4), 4).value();

    CHECK(made.blocks == 3);
    CHECK(made.in_flight == 1);
    CHECK(f.store->lookup(f.space, keys(10, 1)) == 0);
    CHECK(f.store->stats().claims_revoked == 0);
    CHECK(f.store->stats().claims_shortened == 1);  // For the last key: all four frames are held.
    f.store->quiesced(made.frames[0].frame);
  }

  TEST_CASE("a fetch keeps the limits of claims") {
    auto options = pool_of(10);
    options.instance_share = 0.3;
    options.server_share = 0.5;
    StoreFixture f(options);
    f.save(keys(0, 1));
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 6), 6).value();
    CHECK(made.blocks == 3);
    const auto second = f.store->fetch(f.other, f.space, token(2), 0, keys(20, 6), 6).value();
    CHECK(second.blocks == 2);
    CHECK(f.store->stats().held == 5);
    CHECK(f.store->stats().claims_shortened == 2);
    // Blocks that are held already take nothing more of the server's share.
    CHECK(f.store->fetch(f.other, f.space, token(3), 0, keys(0, 2), 0).value().blocks == 1);
    for (const FrameIndex frame : frames_of(made)) f.store->quiesced(frame);
    for (const FrameIndex frame : frames_of(second)) f.store->quiesced(frame);
  }

  TEST_CASE("replicas are evicted before originals, the one evictable for longest first") {
    for (const EvictionKind kind : kEvictionKinds) {
      CAPTURE(to_string(kind));
      auto options = pool_of(4);
      options.eviction = kind;
      StoreFixture f(options);
      f.save(keys(0, 2));
      const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(10, 2), 2).value();
      CHECK(f.store->fetched(made.frames[1].frame));
      CHECK(f.store->fetched(made.frames[0].frame));
      f.store->unclaim(f.holder, token(1));  // The end of the chain becomes evictable first.

      f.save(keys(20, 1));

      CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
      CHECK(f.store->lookup(f.space, keys(10, 2)) == 1);
      CHECK(f.store->stats().evicted_replicas == 1);
      f.save(keys(30, 1));
      CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
      CHECK(f.store->lookup(f.space, keys(10, 2)) == 0);
      f.save(keys(40, 1));
      CHECK(f.store->stats().evictions == 3);
      CHECK(f.store->stats().evicted_replicas == 2);
      CHECK(f.store->stats().replicas == 0);
    }
  }

  TEST_CASE("a fetched block may be invalidated, and a cleanup leaves those in flight alone") {
    StoreFixture f(pool_of(4));
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 2), 2).value();
    REQUIRE(f.store->fetched(made.frames[0].frame));
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    CHECK(f.store->invalidate(f.holder, PinId{1}, 0) == true);
    f.store->release(f.holder, PinId{1});
    f.store->unclaim(f.holder, token(1));

    f.store->start_cleanup();

    CHECK(f.store->cleanup().done);
    CHECK(f.store->cleanup().still_referenced_blocks == 1);
    CHECK(f.free() == 3);
    CHECK(f.store->fetched(made.frames[1].frame));
  }

  TEST_CASE("frames of several shards arrive as a whole") {
    StoreFixture f(pool_of(32));
    const ShapeId shape = f.add_shape(kPage, 3);
    const SpaceId space = f.store->make_space(shape);
    const auto ranks = f.add_ranks(7, 3);

    const auto made = f.store->fetch(ranks[0], space, token(1), 0, keys(0, 2), 2).value();

    REQUIRE(made.frames.size() == 2);
    std::set<std::uint64_t> offsets;
    for (const FrameIndex frame : frames_of(made)) {
      for (std::uint32_t shard = 0; shard < 3; ++shard) {
        offsets.insert(f.store->page_offset(frame, shard));
      }
      CHECK(f.store->fetched(frame));
    }
    CHECK(offsets.size() == 6);
    for (const HolderId rank : ranks) CHECK(f.store->open(rank, token(1), 0, 2, PinId{1}));
  }

  TEST_CASE("the journal lists a fetched block once it is present") {
    StoreFixture f(pool_of(4));
    REQUIRE(f.store->keep_journal());
    const std::uint64_t begin = f.store->journal(f.space, BlockStore::kJournalEnd, 1).next;
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 2), 2).value();
    f.store->quiesced(made.frames[1].frame);
    CHECK(f.store->journal(f.space, begin, 10).entries.empty());

    CHECK(f.store->fetched(made.frames[0].frame));

    const auto said = f.store->journal(f.space, begin, 10).entries;
    REQUIRE(said.size() == 1);
    CHECK(said[0].is_present);
    CHECK(said[0].key == keys(0, 1)[0]);
  }

  TEST_CASE("a lookup counts a miss on a block in flight as such") {
    StoreFixture f(pool_of(4));
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 1), 1).value();
    CHECK(f.store->lookup(f.space, keys(0, 1)) == 0);
    CHECK(f.store->stats().misses[static_cast<std::size_t>(Miss::kInFlight)] == 1);
    f.store->quiesced(made.frames[0].frame);
  }

  TEST_CASE("a lookup of another node changes no counter") {
    StoreFixture f(pool_of(4));
    f.save(keys(0, 2));
    CHECK(f.store->present(f.space, keys(0, 3)) == 2);
    CHECK(f.store->present(SpaceId{77}, keys(0, 3)) == 0);
    CHECK(f.store->stats().lookups == 0);
    CHECK(f.store->stats().lookup_misses == 0);
  }

  TEST_CASE("a fetch that may evict replicas alone costs no saved block its place") {
    using Evicts = BlockStore::Evicts;
    StoreFixture f(pool_of(8));
    f.save(keys(0, 6));

    const auto first =
        f.store->fetch(f.holder, f.space, token(1), 0, keys(10, 4), 4, Evicts::kReplicas).value();

    CHECK(first.blocks == 2);  // The two free frames.
    for (const FrameIndex frame : frames_of(first)) CHECK(f.store->fetched(frame));
    f.store->unclaim(f.holder, token(1));
    const auto second =
        f.store->fetch(f.holder, f.space, token(2), 0, keys(20, 4), 4, Evicts::kReplicas).value();
    CHECK(second.blocks == 2);  // Those of the replicas.
    CHECK(f.store->stats().evicted_replicas == 2);
    CHECK(f.store->lookup(f.space, keys(0, 6)) == 6);
    for (const FrameIndex frame : frames_of(second)) f.store->quiesced(frame);
  }
}

}  // namespace
}  // namespace pegaflow::engine
