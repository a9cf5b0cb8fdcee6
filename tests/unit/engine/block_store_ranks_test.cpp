// Blocks whose shards several ranks save.
#include <algorithm>
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

TEST_SUITE("BlockStore, several ranks") {
  TEST_CASE("the first rank decides each key, and the last one seals") {
    StoreFixture f({.pool_bytes = 64 * kPage});
    const SpaceId space = f.store->make_space(f.add_shape(kPage, 3));
    const auto ranks = f.add_ranks(7, 3);
    f.space = space;
    const auto of_first = f.store->reserve(ranks[1], space, job(1), 0, keys(0, 4));
    REQUIRE(of_first);
    // Further keys are decided by the rank that reserves them first.
    const auto more = f.store->reserve(ranks[0], space, job(1), 0, keys(0, 6));
    REQUIRE(more);
    CHECK(std::equal(of_first->begin(), of_first->end(), more->begin()));
    CHECK(f.store->reserve(ranks[1], space, job(1), 4, keys(4, 2))->back() == more->back());
    CHECK(*f.store->reserve(ranks[2], space, job(1), 0, keys(0, 6)) == *more);
    CHECK(code_of(f.store->reserve(ranks[2], space, job(1), 7, keys(7, 1))) ==
          Errc::kInvalidArgument);
    CHECK(code_of(f.store->reserve(ranks[1], space, job(1), 7, keys(7, 1))) ==
          Errc::kInvalidArgument);

    CHECK(f.store->publish(ranks[0], job(1)) == 0);
    CHECK(f.store->publish(ranks[2], job(1)) == 0);
    CHECK(f.store->lookup(space, keys(0, 6)) == 0);
    CHECK(code_of(f.store->reserve(ranks[0], space, job(1), 6, keys(6, 1))) ==
          Errc::kInvalidArgument);
    CHECK(f.store->publish(ranks[1], job(1), 2) == 4);
    CHECK(f.store->publish(ranks[1], job(1)) == 0);
    CHECK(f.store->lookup(space, keys(0, 6)) == 6);
    CHECK(f.store->stats().reservations == 0);
  }

  TEST_CASE("keys without a result while room was made are decided by the next rank, for all") {
    StoreFixture f({.pool_bytes = 256 * kPage, .slice_blocks = 8});  // 64 units of 4 pages.
    f.save(keys(0, 256));
    while (f.store->work()) {
    }
    const SpaceId space = f.store->make_space(f.add_shape(16 * kPage, 2));
    const auto ranks = f.add_ranks(7, 2);
    const auto ask = [&](HolderId rank, std::size_t first) {
      const auto frames = f.store->reserve(rank, space, job(1), first, keys(first, 3 - first),
                                           BlockStore::NoRoom::kStop);
      REQUIRE(frames);
      return *frames;
    };
    REQUIRE(ask(ranks[0], 0).empty());  // 8 units with 32 blocks have to go first.

    std::vector<FrameIndex> of_second;
    for (int turn = 0; of_second.size() < 3; ++turn) {
      REQUIRE(turn < 100);
      const auto more = ask(ranks[1], of_second.size());
      of_second.insert(of_second.end(), more.begin(), more.end());
    }
    CHECK(f.store->publish(ranks[1], job(1)) == 0);
    CHECK(ask(ranks[0], 0) == of_second);
    CHECK(std::count(of_second.begin(), of_second.end(), kNoFrame) == 0);
    CHECK(f.store->publish(ranks[0], job(1)) == 0);
    CHECK(f.store->lookup(space, keys(0, 3)) == 3);
  }

  TEST_CASE("a rank that repeats its reserve changes nothing") {
    StoreFixture f({.pool_bytes = 64 * kPage});
    const SpaceId space = f.store->make_space(f.add_shape(kPage, 2));
    const auto ranks = f.add_ranks(7, 2);
    const auto frames = f.store->reserve(ranks[0], space, job(1), 0, keys(0, 4));
    REQUIRE(frames);
    REQUIRE(f.store->reserve(ranks[1], space, job(1), 0, keys(0, 4)));

    const auto again = f.store->reserve(ranks[1], space, job(1), 1, keys(1, 2));

    CHECK(again.value() == std::vector<FrameIndex>{(*frames)[1], (*frames)[2]});
    CHECK(f.store->stats().reserved == 4);
    CHECK(f.store->publish(ranks[0], job(1)) == 0);
    CHECK(f.store->publish(ranks[1], job(1)) == 0);
    CHECK(f.store->lookup(space, keys(0, 4)) == 4);
  }

  TEST_CASE("one rank's abandon forgets the block for all, and the frame waits for each writer") {
    StoreFixture f({.pool_bytes = 64 * kPage});
    const SpaceId space = f.store->make_space(f.add_shape(kPage, 3));
    const auto ranks = f.add_ranks(7, 3);
    const auto frames = f.store->reserve(ranks[0], space, job(1), 0, keys(0, 2));
    REQUIRE(f.store->reserve(ranks[1], space, job(1), 0, keys(0, 2)));
    f.store->abandon(ranks[0], job(1));

    // Reserved again in other frames, while rank 1 may still write the old ones.
    const auto again = f.store->reserve(ranks[0], space, job(2), 0, keys(0, 2));
    REQUIRE(again);
    for (const FrameIndex frame : *again) {
      CHECK(std::find(frames->begin(), frames->end(), frame) == frames->end());
    }
    CHECK(f.store->stats().quarantined_timeout == 2);
    CHECK(f.store->may_touch(ranks[1]));
    CHECK(code_of(f.store->publish(ranks[1], job(1))) == Errc::kGone);
    CHECK(f.store->stats().quarantined_timeout == 0);
    CHECK_FALSE(f.store->may_touch(ranks[1]));
    // A rank that reserves late gets an error, until the job's deadline.
    CHECK(code_of(f.store->reserve(ranks[2], space, job(1), 0, keys(0, 2))) == Errc::kGone);
    f.clock.advance(std::chrono::seconds(31));
    f.store->expire();
    while (f.store->work()) {
    }
    f.store->abandon(ranks[0], job(2));
    CHECK(f.store->stats().used_bytes == 0);
    CHECK_FALSE(f.store->next_deadline());
  }

  TEST_CASE("a rank that is lost between reserve and publish ends the job") {
    StoreFixture f({.pool_bytes = 64 * kPage});
    const SpaceId space = f.store->make_space(f.add_shape(kPage, 2));
    const auto ranks = f.add_ranks(7, 2);
    REQUIRE(f.store->reserve(ranks[0], space, job(1), 0, keys(0, 2)));
    REQUIRE(f.store->reserve(ranks[1], space, job(1), 0, keys(0, 2)));
    CHECK(f.store->publish(ranks[1], job(1)) == 0);  // It is lost all the same.
    f.store->holder_lost(ranks[0]);

    CHECK(f.store->stats().quarantined_writer_lost == 2);
    CHECK(code_of(f.store->publish(ranks[1], job(1))) == Errc::kGone);
    CHECK(f.store->lookup(space, keys(0, 2)) == 0);
    f.store->holder_gone(ranks[0]);
    while (f.store->work()) {
    }
    CHECK(f.store->stats().used_bytes == 0);
  }

  TEST_CASE("a rank that never reserves lets the job time out, and no frame waits for it") {
    StoreFixture f({.pool_bytes = 64 * kPage});
    const SpaceId space = f.store->make_space(f.add_shape(kPage, 2));
    const auto ranks = f.add_ranks(7, 2);
    REQUIRE(f.store->reserve(ranks[0], space, job(1), 0, keys(0, 2)));
    CHECK(f.store->publish(ranks[0], job(1)) == 0);
    f.clock.advance(std::chrono::seconds(31));
    f.store->expire();
    while (f.store->work()) {
    }
    CHECK(f.store->stats().reservations_timed_out == 1);
    CHECK(f.store->stats().used_bytes == 0);
  }

  TEST_CASE("a block that not every rank has reserved is never sealed") {
    StoreFixture f({.pool_bytes = 64 * kPage});
    const SpaceId space = f.store->make_space(f.add_shape(kPage, 2));
    const auto ranks = f.add_ranks(7, 2);
    REQUIRE(f.store->reserve(ranks[0], space, job(1), 0, keys(0, 5)));
    REQUIRE(f.store->reserve(ranks[1], space, job(1), 0, keys(0, 3)));
    CHECK(f.store->publish(ranks[0], job(1)) == 0);
    CHECK(code_of(f.store->publish(ranks[1], job(1))) == Errc::kGone);
    CHECK(f.store->lookup(space, keys(0, 5)) == 0);
    while (f.store->work()) {
    }
    CHECK(f.store->stats().used_bytes == 0);
  }

  TEST_CASE("a job with nothing to save ends with the last rank's publish") {
    StoreFixture f({.pool_bytes = 64 * kPage});
    const SpaceId space = f.store->make_space(f.add_shape(kPage, 2));
    const auto ranks = f.add_ranks(7, 2);
    for (const HolderId rank : ranks) REQUIRE(f.store->reserve(rank, space, job(1), 0, {}));
    CHECK(f.store->stats().reservations == 1);
    for (const HolderId rank : ranks) CHECK(f.store->publish(rank, job(1)) == 0);
    CHECK(f.store->stats().reservations == 0);
    CHECK_FALSE(f.store->next_deadline());
  }

  TEST_CASE("a holder with a wrong number of shards, or another's shard, gets nothing") {
    StoreFixture f({.pool_bytes = 64 * kPage});
    const SpaceId space = f.store->make_space(f.add_shape(kPage, 2));
    const auto ranks = f.add_ranks(7, 2);
    const auto others = f.add_ranks(8, 2);
    REQUIRE(f.store->reserve(ranks[0], space, job(1), 0, keys(0, 2)));
    CHECK(code_of(f.store->reserve(f.holder, space, job(1), 0, keys(0, 2))) ==
          Errc::kInvalidArgument);
    CHECK(code_of(f.store->reserve(others[0], space, job(1), 0, keys(0, 2))) ==
          Errc::kInvalidArgument);
    CHECK(code_of(f.store->publish(others[1], job(1))) == Errc::kGone);
    f.store->abandon(f.holder, job(1));
    CHECK(f.store->publish(ranks[0], job(1)) == 0);
    CHECK(f.store->stats().reservations == 1);
  }
}

}  // namespace
}  // namespace pegaflow::engine
