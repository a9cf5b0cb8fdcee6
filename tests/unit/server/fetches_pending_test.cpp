// Blocks that an owner first reads from its disks: when they are requested, read and given up.
#include <cstdint>

#include <doctest/doctest.h>

#include "tests/unit/server/fetches_fixture.h"

namespace pegaflow::testing {
namespace {

/// A cluster of one owner, which has the first `in_pool` blocks of each lease in its pool and the
/// others on its disks.
struct Pending : Fixture {
  explicit Pending(std::size_t in_pool, std::uint64_t disk_rate = 0)
      : Fixture(256, {.batch_bytes = kPage}) {
    owner().in_pool = in_pool;
    owner().disk_rate = disk_rate;
  }
  [[nodiscard]] PlayedLender& owner() { return peers.lenders.front(); }
  void lend(std::size_t blocks, std::uint32_t page = 40) {
    REQUIRE(owner().asked());
    owner().lend_pending(blocks, page);
    io.waitScope.poll();
  }
  void complete_all() {
    while (!fabric.batches.empty()) complete();
  }
};

TEST_SUITE("blocks on disks of other nodes") {
  TEST_CASE("they are leased with those in the pool, and read once the owner lends them") {
    Pending f(2);
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    f.complete_all();
    CHECK(f.here(keys(1, 6)) == 2);
    REQUIRE(f.owner().asked());
    CHECK(f.owner().asked()->pending == 4);
    CHECK(f.owner().asked()->number == 1);

    f.lend(3);
    REQUIRE(f.fabric.batches.size() >= 2);
    CHECK(f.fabric.batches.front().chunks.at(0).remote_offset == 40 * kPage);
    f.complete_all();
    CHECK(f.here(keys(1, 6)) == 5);
    CHECK(f.owner().asked()->pending == 1);
    f.lend(1);
    f.complete_all();

    CHECK(f.here(keys(1, 6)) == 6);
    CHECK(f.source->stats().pending == 4);
    CHECK(f.owner().ended_stagings.empty());  // The owner has lent all of them.
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("each part is sealed only after the owner confirmed the lease on it") {
    Pending f(0);
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    f.owner().is_confirming = false;
    f.lend(2);
    f.complete_all();
    CHECK(f.owner().confirmed == std::vector<std::uint64_t>{1});
    CHECK(f.here(keys(1, 3)) == 0);
  }

  TEST_CASE("they are requested again while the owner has none of them, and at last given up") {
    Pending f(1);
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    f.complete_all();
    for (int i = 0; i < 3; ++i) f.lend(0);
    CHECK(f.owner().asked()->pending == 2);

    f.clock.advance(std::chrono::seconds(3));  // After the deadline of the claim.
    f.lend(0);

    CHECK_FALSE(f.owner().asked());
    CHECK(f.owner().ended_stagings == std::vector<std::uint64_t>{1});
    CHECK(f.fetches->stats().given_up == 2);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("those that the owner gives up are requested from another owner") {
    Pending f(0);
    f.peers.lenders.resize(2);
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    f.lend(1);
    f.owner().answer_pending(LeaseGrant{});
    f.io.waitScope.poll();

    CHECK(f.fetches->stats().retried == 2);
    CHECK(f.peers.lenders.back().leases == 1);
    f.complete_all();
    CHECK(f.here(keys(1, 3)) == 3);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("of those that the owner shortens, the others are read") {
    Pending f(0);
    REQUIRE(f.claim(kOne, keys(1, 5)) == 5);
    LeaseGrant grant{.lease = ++f.owner().leases, .granted = std::chrono::seconds(10)};
    grant.pages = {40, 41};
    grant.pending = {.blocks = 1};
    grant.staging = 1;
    f.owner().answer_pending(std::move(grant));
    f.io.waitScope.poll();
    CHECK(f.fetches->stats().given_up == 2);
    CHECK(f.owner().asked()->pending == 1);
    f.lend(1);
    f.complete_all();
    CHECK(f.here(keys(1, 5)) == 3);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("an owner that does not answer in time is asked for nothing more") {
    Pending f(0);
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    f.owner().answer_pending(fail(Errc::kTimeout, "played"));
    f.io.waitScope.poll();
    CHECK(f.fetches->stats().given_up == 3);
    CHECK(f.owner().ended_stagings == std::vector<std::uint64_t>{1});
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("after the end of the claim the owner reads no more of them") {
    Pending f(1);
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    f.complete_all();
    f.unclaim(kOne);
    f.lend(1);  // What it had lent meanwhile is not read.

    CHECK(f.fabric.batches.empty());
    CHECK(f.owner().ended_stagings == std::vector<std::uint64_t>{1});
    CHECK(f.fetches->stats().unwanted == 3);
    f.check_rest();
  }

  TEST_CASE("a reset during the wait drops them") {
    Pending f(0);
    REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
    f.lend(1);
    REQUIRE(f.service->reset_cache(f.engine));
    f.complete_all();
    f.lend(1);
    f.complete_all();
    CHECK(f.here(keys(1, 2)) == 0);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("they are fetched if disks and lane together are predicted to be fast enough") {
    // The lane takes 10 ms a block, and the engine 20.
    const auto blocks_of = [](std::uint64_t disk_rate) {
      Pending f(~std::size_t{0});
      f.measure();
      f.owner().in_pool = 0;
      f.owner().disk_rate = disk_rate;
      const std::size_t claimed = f.claim(kOne, keys(1, 6), milliseconds(20)).blocks;
      f.fetches.reset();
      return claimed;
    };
    CHECK(blocks_of(1000 * kPage) == 6);  // A block takes the disk a millisecond.
    CHECK(blocks_of(100 * kPage) == 6);   // As long as the lane.
    // Slower than computing, but not measured from here: one batch is tried.
    CHECK(blocks_of(25 * kPage) == 1);
    CHECK(blocks_of(0) == 1);
  }

  TEST_CASE("disks that were measured and are too slow are not read from") {
    Pending f(~std::size_t{0});
    f.measure();
    f.owner().in_pool = 0;
    f.owner().disk_rate = 25 * kPage;
    REQUIRE(f.claim(kOne, keys(1, 6), milliseconds(20)).blocks == 1);
    f.clock.advance(milliseconds(40));
    f.lend(1);
    f.complete_all();
    f.unclaim(kOne);

    CHECK(f.claim(kTwo, keys(2, 6), milliseconds(20)).blocks == 0);
    CHECK(f.claim(kTwo, keys(2, 6), milliseconds(100)).blocks == 6);
    f.fetches.reset();
  }

  TEST_CASE("a load ends when the disks of its owner do not respond") {
    Pending f(0, 100 * kPage);
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    const auto question = f.open(kOne, 3, server::Fetches::Wait::kForever);
    CHECK_FALSE(f.is_answered(question));
    for (int i = 0; i < 3; ++i) {
      f.clock.advance(milliseconds(5));
      f.lend(0);
    }
    CHECK_FALSE(f.is_answered(question));
    // A block was due after 10 ms.
    f.clock.advance(milliseconds(10));
    f.lend(0);

    REQUIRE(f.is_answered(question));
    REQUIRE(*question->answer);
    CHECK((*question->answer)->late == Late::kStuck);
    // The next claim is declined at once.
    CHECK(f.claim(kTwo, keys(2, 3), milliseconds(20)).blocks == 0);
    f.fetches.reset();
  }
}

}  // namespace
}  // namespace pegaflow::testing
