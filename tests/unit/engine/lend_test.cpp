// Blocks that another node reads until a time: BlockStore::lend().
#include <chrono>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::code_of;
using testing::keys;
using testing::kPage;
using testing::StoreFixture;
using testing::token;

BlockStore::Options pool_of(std::uint64_t frames) {
  return {.pool_bytes = frames * kPage, .instance_share = 1, .server_share = 1, .lend_share = 1};
}

TEST_SUITE("BlockStore, leases") {
  TEST_CASE("lent blocks stay where they are until the reader ends the lease") {
    StoreFixture f(pool_of(4));
    const auto frames = f.save(keys(0, 2));

    const auto lent = f.store->lend(f.space, keys(0, 3), seconds(10)).value();

    CHECK(lent.frames == frames);
    CHECK(f.store->is_lent(lent.lease));
    CHECK(f.store->stats().leases == 1);
    CHECK(f.store->stats().lent == 2);
    CHECK(f.store->stats().lent_bytes == 2 * kPage);
    CHECK(f.store->stats().held == 2);
    CHECK(f.store->stats().oldest_lease == f.clock.now());
    CHECK_FALSE(f.store->is_idle());
    f.save(keys(10, 2));
    f.save(keys(20, 2));  // Evicts the two before.
    f.store->start_cleanup();
    CHECK(f.store->cleanup().still_referenced_blocks == 2);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);

    f.store->end_lease(lent.lease);
    f.store->end_lease(lent.lease);

    CHECK_FALSE(f.store->is_lent(lent.lease));
    CHECK(f.store->is_idle());
    CHECK(f.store->stats().leases_expired == 0);
    CHECK_FALSE(f.store->stats().oldest_lease);
    CHECK_FALSE(f.store->next_deadline());
  }

  TEST_CASE("a lease expires by itself, a margin later than the reader knows") {
    StoreFixture f(pool_of(4));
    f.save(keys(0, 2));
    const auto start = f.clock.now();
    const auto later = f.store->lend(f.space, keys(0, 2), seconds(10)).value();
    const auto sooner = f.store->lend(f.space, keys(0, 1), seconds(2)).value();
    CHECK(f.store->next_deadline() == start + seconds(3));

    f.clock.advance(milliseconds(2999));
    f.store->expire();
    CHECK(f.store->is_lent(sooner.lease));
    f.clock.advance(milliseconds(1));
    f.store->expire();

    CHECK_FALSE(f.store->is_lent(sooner.lease));
    CHECK(f.store->is_lent(later.lease));
    CHECK(f.store->stats().leases_expired == 1);
    CHECK(f.store->next_deadline() == start + seconds(11));
    CHECK(f.store->stats().held == 2);
    f.clock.advance(seconds(8));
    f.store->expire();
    while (f.store->work()) {
    }
    CHECK(f.store->is_idle());
  }

  TEST_CASE("many leases that expire at once end in slices") {
    auto options = pool_of(8);
    options.slice_blocks = 2;
    StoreFixture f(options);
    f.save(keys(0, 1));
    for (int i = 0; i < 5; ++i) CHECK(f.store->lend(f.space, keys(0, 1), seconds(1)));
    f.clock.advance(seconds(2));
    f.store->expire();
    CHECK(f.store->stats().leases == 3);
    CHECK(f.store->next_deadline() == f.clock.now());
    f.store->expire();
    f.store->expire();
    CHECK(f.store->stats().leases == 0);
  }

  TEST_CASE("a reservation that is due earlier is not forgotten for a lease") {
    auto options = pool_of(8);
    options.reservation_timeout = seconds(4);
    StoreFixture f(options);
    f.save(keys(0, 1));
    REQUIRE(f.store->reserve(f.holder, f.space, testing::job(1), 0, keys(1, 1)));
    CHECK(f.store->lend(f.space, keys(0, 1), seconds(5)));
    CHECK(f.store->next_deadline() == f.clock.now() + seconds(4));
    f.clock.advance(seconds(4));
    f.store->expire();
    CHECK(f.store->stats().reservations_timed_out == 1);
    CHECK(f.store->next_deadline() == f.clock.now() + seconds(2));
    f.store->abandon(f.holder, testing::job(1));
  }

  TEST_CASE("missing blocks are not lent, and without blocks there is no lease") {
    StoreFixture f(pool_of(4));
    f.save(keys(1, 1));
    const auto none = f.store->lend(f.space, keys(0, 2), seconds(1)).value();
    CHECK(none.lease == LeaseId{});
    CHECK(none.frames.empty());
    CHECK_FALSE(f.store->is_lent(LeaseId{}));
    CHECK(f.store->lend(SpaceId{77}, keys(1, 1), seconds(1)).value().frames.empty());
    CHECK(f.store->stats().leases_made == 0);
    f.store->end_lease(LeaseId{});
    f.store->end_lease(LeaseId{~std::uint64_t{0}});
  }

  TEST_CASE("leases are limited in time and number") {
    auto options = pool_of(4);
    options.longest_lease = seconds(20);
    options.max_leases = 2;
    StoreFixture f(options);
    f.save(keys(0, 1));
    const auto lend = [&](Duration time) { return f.store->lend(f.space, keys(0, 1), time); };
    CHECK(code_of(lend(seconds(0))) == Errc::kInvalidArgument);
    CHECK(code_of(lend(milliseconds(20001))) == Errc::kInvalidArgument);
    const auto first = lend(seconds(20)).value();
    const auto second = lend(milliseconds(1)).value();
    CHECK(code_of(lend(seconds(1))) == Errc::kBusy);
    f.store->end_lease(first.lease);
    const auto third = lend(seconds(1)).value();
    CHECK(third.lease != first.lease);  // In the same row.
    CHECK_FALSE(f.store->is_lent(first.lease));
    CHECK(f.store->is_lent(second.lease));
  }

  TEST_CASE("leases have a share of the pool, and count in the server's share") {
    auto options = pool_of(8);
    options.lend_share = 0.5;
    options.server_share = 0.75;
    StoreFixture f(options);
    f.save(keys(0, 8));
    const auto first = f.store->lend(f.space, keys(0, 3), seconds(9)).value();
    CHECK(first.frames.size() == 3);
    CHECK(f.store->lend(f.space, keys(0, 3), seconds(9)).value().frames.size() == 1);
    CHECK(f.store->stats().leases_shortened == 1);
    CHECK(f.store->lend(f.space, keys(0, 3), seconds(9)).value().frames.empty());
    // Lent blocks take their part of the server's share: with two claimed it has five, so one is
    // left.
    CHECK(f.store->claim(f.holder, f.space, keys(3, 5), token(1)) == 3);
    f.store->end_lease(first.lease);
    CHECK(f.store->lend(f.space, keys(6, 2), seconds(9)).value().frames.size() == 2);
  }

  TEST_CASE("a lease outlives a reset, and makes blocks recent") {
    StoreFixture f(pool_of(3));
    f.save(keys(0, 1));
    f.save(keys(1, 1));
    f.store->end_lease(f.store->lend(f.space, keys(0, 1), seconds(1)).value().lease);
    f.save(keys(5, 2));
    CHECK(f.store->lookup(f.space, keys(0, 1)) == 1);
    CHECK(f.store->lookup(f.space, keys(1, 1)) == 0);

    const auto lent = f.store->lend(f.space, keys(0, 1), seconds(1)).value();
    f.store->retire_space(f.space);
    while (f.store->work()) {
    }

    CHECK(f.store->is_lent(lent.lease));
    CHECK(f.free() == 2);
    f.store->end_lease(lent.lease);
    CHECK(f.free() == 3);
  }

  TEST_CASE("wrong bytes that are lent are freed when the lease has ended") {
    StoreFixture f(pool_of(3));
    f.save(keys(0, 1));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 1), token(1)) == 1);
    REQUIRE(f.store->open(f.holder, token(1), 0, 1, PinId{1}));
    const auto lent = f.store->lend(f.space, keys(0, 1), seconds(1)).value();
    CHECK(f.store->invalidate(f.holder, PinId{1}, 0) == true);
    CHECK(f.store->lend(f.space, keys(0, 1), seconds(1)).value().frames.empty());
    f.store->release(f.holder, PinId{1});
    f.store->unclaim(f.holder, token(1));
    CHECK(f.free() == 2);
    f.store->end_lease(lent.lease);
    CHECK(f.free() == 3);
  }

  TEST_CASE("saves revoke claims, and never a lease") {
    StoreFixture f(pool_of(2));
    f.save(keys(0, 2));
    const auto lent = f.store->lend(f.space, keys(0, 1), seconds(1)).value();
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 2), token(1)) == 2);
    const auto frames = f.store->reserve(f.other, f.space, testing::job(1), 0, keys(8, 2)).value();
    CHECK(frames[0] != kNoFrame);
    CHECK(frames[0] != lent.frames[0]);
    CHECK(frames[1] == kNoFrame);
    CHECK(f.store->stats().claims_revoked == 1);
    f.store->abandon(f.other, testing::job(1));
  }
}

}  // namespace
}  // namespace pegaflow::engine
