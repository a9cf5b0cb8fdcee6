// Blocks of several kinds: claims that are made together, and shards without a page.
#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using testing::code_of;
using testing::job;
using testing::keys;
using testing::kPage;
using testing::StoreFixture;
using testing::token;

/// A pool of 32 pages; a block of kind 1 has two of them.
struct Fixture : StoreFixture {
  explicit Fixture(BlockStore::Options options = {.pool_bytes = 32 * kPage,
                                                  .instance_share = 1.0,
                                                  .server_share = 1.0})
      : StoreFixture(options), windows(store->make_space(add_shape(2 * kPage))) {}

  void save_to(SpaceId to, const std::vector<BlockKey>& blocks) {
    const JobId saved{Id128{3, 3}, ++saves};
    REQUIRE(store->reserve(holder, to, saved, 0, blocks));
    REQUIRE(store->publish(holder, saved) == 0);
  }
  Result<bool> claim(const std::vector<BlockKey>& prefix, const std::vector<BlockKey>& window,
                     std::uint64_t name = 1) {
    const std::vector<BlockStore::ClaimPart> parts = {
        {.space = space, .keys = prefix, .token = token(name)},
        {.space = windows, .keys = window, .token = token(name + 100)}};
    return store->claim_together(holder, parts);
  }
  void work() const {
    while (store->work()) {
    }
  }
  SpaceId windows;
  std::uint64_t saves = 0;
};

TEST_SUITE("BlockStore, several kinds") {
  TEST_CASE("each block has a bit of its own, and only its own kind counts") {
    Fixture f;
    f.save_to(f.space, {keys(0, 1).front(), keys(2, 1).front()});
    f.save_to(f.windows, keys(1, 1));
    CHECK(f.store->present_each(f.space, keys(0, 4)) == 0b0101);
    CHECK(f.store->present_each(f.windows, keys(0, 4)) == 0b0010);
    CHECK(f.store->present_each(f.space, keys(0, 64)) == 0b0101);
    CHECK(f.store->present_each(SpaceId{99}, keys(0, 4)) == 0);
    CHECK(f.store->stats().lookups == 0);
  }

  TEST_CASE("a save in progress is not present") {
    Fixture f;
    REQUIRE(f.store->reserve(f.holder, f.space, job(1), 0, keys(0, 2)));
    CHECK(f.store->present_each(f.space, keys(0, 2)) == 0);
    CHECK(f.store->publish(f.holder, job(1), 1) == 1);
    CHECK(f.store->present_each(f.space, keys(0, 2)) == 0b10);
    CHECK(f.store->publish(f.holder, job(1)) == 0);
    CHECK(f.store->present_each(f.space, keys(0, 2)) == 0b11);
  }

  TEST_CASE("claims that are joined end together, and a claim that is gone is not joined") {
    Fixture f;
    f.save_to(f.space, keys(0, 2));
    f.save_to(f.windows, keys(0, 2));
    const std::vector<Id128> tokens = {token(1), token(2)};
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), tokens[0]) == 2);
    CHECK(code_of(f.store->join_claims(f.holder, tokens)) == Errc::kGone);
    REQUIRE(f.store->claim(f.holder, f.windows, keys(0, 2), tokens[1]) == 2);
    const HolderId other = f.store->add_holder(2, Id128{9, 9});
    CHECK(code_of(f.store->join_claims(other, tokens)) == Errc::kGone);

    REQUIRE(f.store->join_claims(f.holder, tokens));
    CHECK(f.store->stats().claims == 2);
    f.store->unclaim(f.holder, tokens[1]);
    f.work();
    CHECK(f.store->stats().claims == 0);
    CHECK(f.store->stats().held == 0);
    REQUIRE(f.store->check());
  }

  TEST_CASE("the blocks of all parts are claimed, or none") {
    Fixture f;
    f.save_to(f.space, keys(0, 4));
    f.save_to(f.windows, keys(2, 2));
    CHECK(f.claim(keys(0, 4), keys(2, 2)).value());
    CHECK(f.store->stats().claims == 2);
    CHECK(f.store->stats().held == 6);
    f.store->unclaim(f.holder, token(1));
    f.work();

    CHECK_FALSE(f.claim(keys(0, 4), keys(1, 2)).value());  // Window block 1 is missing.
    CHECK_FALSE(f.claim(keys(0, 5), keys(2, 2)).value());
    f.work();
    CHECK(f.store->stats().claims == 0);
    CHECK(f.store->stats().held == 0);
  }

  TEST_CASE("a limit leaves no part of the claims behind") {
    Fixture f({.pool_bytes = 32 * kPage, .instance_share = 0.25, .server_share = 1.0});
    f.save_to(f.space, keys(0, 6));
    f.save_to(f.windows, keys(4, 2));
    CHECK(f.store->room_to_claim(f.holder).bytes == 8 * kPage);
    CHECK_FALSE(f.claim(keys(0, 6), keys(4, 2)).value());  // 10 pages.
    f.work();
    CHECK(f.store->stats().held == 0);
    CHECK(f.store->stats().claims_shortened == 1);
    CHECK(f.claim(keys(0, 4), keys(4, 2)).value());  // 8 pages.
    CHECK(f.store->room_to_claim(f.holder).bytes == 0);
    CHECK(f.store->room_to_claim(f.other).bytes == 8 * kPage);  // It has a share of its own.
    CHECK(f.store->room_to_claim(HolderId{99}).bytes == 0);
  }

  TEST_CASE("the server's share limits the room of all") {
    Fixture f({.pool_bytes = 32 * kPage, .instance_share = 1.0, .server_share = 0.25});
    f.save_to(f.space, keys(0, 6));
    f.save_to(f.windows, keys(4, 2));
    CHECK_FALSE(f.claim(keys(0, 6), keys(4, 2)).value());
    f.work();
    CHECK(f.claim(keys(0, 4), keys(4, 2)).value());
    CHECK(f.store->room_to_claim(f.other).new_bytes == 0);
    CHECK(f.store->room_to_claim(f.other).bytes == 32 * kPage);
    // Of these blocks the first 4 are held, and need no room.
    CHECK(f.store->held_each(f.space, keys(0, 6)) == 0b1111);
    CHECK(f.store->present_each(f.space, keys(0, 6)) == 0b111111);
    CHECK(f.store->frame_bytes(f.space) == kPage);
    f.store->retire_space(f.space);
    CHECK(f.store->held_each(f.space, keys(0, 6)) == 0);
    CHECK(f.store->frame_bytes(f.space) == 0);
  }

  TEST_CASE("a token in use is an error, and the claim under it stays") {
    Fixture f;
    f.save_to(f.space, keys(0, 4));
    f.save_to(f.windows, keys(2, 2));
    REQUIRE(f.claim(keys(0, 4), keys(2, 2)).value());
    CHECK(code_of(f.claim(keys(0, 4), keys(2, 2))) == Errc::kInvalidArgument);
    const std::vector<BlockKey> window = keys(2, 2);
    const BlockStore::ClaimPart part{.space = f.windows, .keys = window, .token = token(101)};
    CHECK(code_of(f.store->claim_together(f.holder, std::span(&part, 1))) ==
          Errc::kInvalidArgument);
    f.work();
    CHECK(f.store->open(f.holder, token(1), 0, 4, PinId{1}));
    CHECK(f.store->open(f.holder, token(101), 0, 2, PinId{2}));
    CHECK(code_of(f.store->claim_together(HolderId{99}, {})) == Errc::kGone);
  }

  TEST_CASE("without a row for each part there is no claim") {
    Fixture f({.pool_bytes = 32 * kPage, .max_claims = 3});
    f.save_to(f.space, keys(0, 2));
    f.save_to(f.windows, keys(0, 2));
    REQUIRE(f.claim(keys(0, 2), keys(0, 2)).value());
    CHECK(code_of(f.claim(keys(0, 2), keys(0, 2), 2)) == Errc::kBusy);
    f.work();
    CHECK(f.store->stats().claims == 2);
  }

  TEST_CASE("the end of one part ends all, and pins stay") {
    for (const std::uint64_t ended : {1, 101}) {
      Fixture f;
      f.save_to(f.space, keys(0, 4));
      f.save_to(f.windows, keys(2, 2));
      REQUIRE(f.claim(keys(0, 4), keys(2, 2)).value());
      REQUIRE(f.store->open(f.holder, token(101), 0, 1, PinId{1}));
      f.store->unclaim(f.holder, token(ended));
      f.work();
      CHECK(f.store->stats().claims == 0);
      CHECK(f.store->stats().held == 1);
      CHECK(code_of(f.store->open(f.holder, token(1), 0, 1, PinId{2})) == Errc::kGone);
    }
  }

  TEST_CASE("claims that are made together are revoked together") {
    Fixture f;
    f.save_to(f.space, keys(0, 4));
    f.save_to(f.windows, keys(2, 2));
    REQUIRE(f.claim(keys(0, 4), keys(2, 2)).value());
    // 24 pages are free: the 25th block revokes the claims.
    f.save_to(f.space, keys(100, 25));
    f.work();
    CHECK(f.store->stats().claims == 0);
    CHECK(f.store->stats().claims_revoked == 1);
    CHECK(code_of(f.store->open(f.holder, token(1), 0, 1, PinId{1})) == Errc::kGone);
    CHECK(code_of(f.store->open(f.holder, token(101), 0, 1, PinId{1})) == Errc::kGone);
  }

  TEST_CASE("one opened part keeps the others from being revoked as abandoned") {
    Fixture f({.pool_bytes = 32 * kPage, .instance_share = 1.0, .server_share = 1.0});
    f.save_to(f.space, keys(0, 8));
    f.save_to(f.windows, keys(2, 2));
    REQUIRE(f.claim(keys(0, 4), keys(2, 2)).value());
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    REQUIRE(f.store->claim(f.other, f.space, keys(0, 8), token(7)) == 8);  // Younger.
    f.clock.advance(std::chrono::seconds(2));
    f.save_to(f.space, keys(100, 21));  // One more than there is room for.
    f.work();
    CHECK(f.store->stats().claims_revoked == 1);
    CHECK(code_of(f.store->open(f.other, token(7), 0, 1, PinId{1})) == Errc::kGone);
    CHECK(f.store->open(f.holder, token(101), 0, 2, PinId{2}));
  }

  TEST_CASE("a lookup over several kinds is counted by its caller") {
    Fixture f;
    f.save_to(f.space, keys(0, 3));
    f.store->note_lookup(f.space, keys(0, 5), 2);
    const BlockStore::Stats stats = f.store->stats();
    CHECK(stats.lookups == 1);
    CHECK(stats.lookup_hits == 2);
    CHECK(stats.lookup_misses == 3);
    CHECK(stats.misses[static_cast<std::size_t>(Miss::kBehindHole)] == 1);
    CHECK(stats.misses[static_cast<std::size_t>(Miss::kNew)] == 2);
  }

  TEST_CASE("the journal of several generations has one order") {
    Fixture f;
    REQUIRE(f.store->keep_journal());
    const SpaceId both[] = {f.space, f.windows};
    const std::uint64_t start = f.store->journal(both, BlockStore::kJournalEnd, 100).next;
    f.save_to(f.space, keys(1, 1));
    f.save_to(f.windows, keys(1, 1));
    f.save_to(f.store->make_space(f.shape), keys(5, 1));
    f.save_to(f.space, keys(2, 1));
    const auto text = [](const BlockStore::JournalPart& part) {
      std::string words;
      for (const BlockStore::JournalEntry& entry : part.entries) {
        words += std::to_string(entry.place) + ":" + std::to_string(entry.key.hash() - 1) + " ";
      }
      return words;
    };
    CHECK(text(f.store->journal(both, start, 100)) == "0:1 1:1 0:2 ");
    CHECK(text(f.store->journal(f.windows, start, 100)) == "0:1 ");
    const auto first = f.store->journal(both, start, 2);
    CHECK(text(first) == "0:1 1:1 ");
    CHECK(first.has_more);
    CHECK(text(f.store->journal(both, first.next, 100)) == "0:2 ");
    CHECK(f.store->journal(std::span<const SpaceId>{}, start, 100).entries.empty());
  }
}

/// Blocks of three shards, the second of which has no page.
struct Shards : StoreFixture {
  Shards() : StoreFixture({.pool_bytes = 64 * kPage}), ranks(add_ranks(7, 3)) {
    const auto added = store->add_shape(
        Shape{{{.page_bytes = kPage}, {.page_bytes = 0}, {.page_bytes = 2 * kPage}}});
    REQUIRE(added);
    space = store->make_space(*added);
  }
  std::vector<HolderId> ranks;
};

TEST_SUITE("BlockStore, shards without a page") {
  TEST_CASE("they take no room, and a block of nothing but such shards is refused") {
    Shards f;
    const auto frames = f.store->reserve(f.ranks[0], f.space, job(1), 0, keys(0, 2));
    REQUIRE(frames);
    CHECK(f.store->stats().used_bytes == 2 * 3 * kPage);
    CHECK(f.store->page_offset((*frames)[0], 2) == f.store->page_offset((*frames)[0], 0) + kPage);
    CHECK(f.store->page_bytes((*frames)[0], 1) == 0);
    CHECK(code_of(f.store->add_shape(Shape{{{.page_bytes = 0}, {.page_bytes = 0}}})) ==
          Errc::kInvalidArgument);
  }

  TEST_CASE("they count as published") {
    Shards f;
    REQUIRE(f.store->reserve(f.ranks[0], f.space, job(1), 0, keys(0, 2)));
    CHECK(code_of(f.store->reserve(f.ranks[1], f.space, job(1), 0, keys(0, 2))) ==
          Errc::kInvalidArgument);
    REQUIRE(f.store->reserve(f.ranks[2], f.space, job(1), 0, keys(0, 2)));
    CHECK(f.store->publish(f.ranks[0], job(1)) == 0);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 0);
    CHECK(f.store->publish(f.ranks[2], job(1)) == 0);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
    CHECK(f.store->stats().reservations == 0);
    CHECK(f.store->is_idle());
  }

  TEST_CASE("a job that is given up ends without them") {
    Shards f;
    REQUIRE(f.store->reserve(f.ranks[0], f.space, job(1), 0, keys(0, 2)));
    f.store->abandon(f.ranks[0], job(1));
    REQUIRE(code_of(f.store->reserve(f.ranks[2], f.space, job(1), 0, keys(0, 2))) == Errc::kGone);
    f.store->abandon(f.ranks[2], job(1));
    while (f.store->work()) {
    }
    CHECK(f.store->stats().used_bytes == 0);
    // Its name is free again.
    REQUIRE(f.store->reserve(f.ranks[2], f.space, job(1), 0, keys(0, 1)));
    f.clock.advance(std::chrono::seconds(31));
    f.store->expire();
    CHECK(f.store->stats().quarantined_timeout == 1);
    f.store->abandon(f.ranks[2], job(1));
    while (f.store->work()) {
    }
    CHECK(f.store->stats().used_bytes == 0);
  }

  TEST_CASE("a rank that is lost takes the job with it, one without a page does not") {
    Shards f;
    REQUIRE(f.store->reserve(f.ranks[0], f.space, job(1), 0, keys(0, 2)));
    f.store->holder_gone(f.ranks[1]);
    REQUIRE(f.store->reserve(f.ranks[2], f.space, job(1), 0, keys(0, 2)));
    CHECK(f.store->publish(f.ranks[0], job(1)) == 0);
    CHECK(f.store->publish(f.ranks[2], job(1)) == 0);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);

    REQUIRE(f.store->reserve(f.ranks[0], f.space, job(2), 0, keys(5, 2)));
    f.store->holder_gone(f.ranks[2]);
    CHECK(f.store->is_saving(job(2)));
    f.store->holder_gone(f.ranks[0]);
    while (f.store->work()) {
    }
    CHECK_FALSE(f.store->is_saving(job(2)));
    CHECK(f.store->is_idle());
  }
}

}  // namespace
}  // namespace pegaflow::engine
