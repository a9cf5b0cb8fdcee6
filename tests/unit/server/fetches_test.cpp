// The blocks that Fetches and PeerSource read from owners, and those that they leave out.
#include "server/fetches/fetches.h"

#include <cstdint>

#include <doctest/doctest.h>

#include "tests/unit/server/fetches_fixture.h"

namespace pegaflow::testing {
namespace {

TEST_SUITE("Fetches") {
  TEST_CASE("an owner has some batches at the fabric, in the order of the prefix") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    CHECK(f.source->stats().batches == 6);
    for (std::uint64_t block = 0; block < 6; ++block) {
      CHECK(f.fabric.batches.size() == std::min<std::uint64_t>(2, 6 - block));
      CHECK(f.fabric.batches.front().chunks.at(0).remote_offset == block * kPage);
      f.complete();
      CHECK(f.here(keys(1, 6)) == block + 1);
    }
    CHECK(f.fetches->stats().blocks == 6);
    f.check_rest();
  }

  TEST_CASE("blocks are sealed only after the owner confirmed the lease") {
    Fixture f;
    f.peers.lenders.front().is_confirming = false;
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    f.complete();
    f.complete();

    // The next blocks are read meanwhile, with one confirmation in flight.
    CHECK(f.fabric.batches.size() == 1);
    CHECK(f.peers.lenders.front().confirmed.size() == 1);
    CHECK(f.here(keys(1, 3)) == 0);
  }

  TEST_CASE(
      "blocks that the owner does not confirm are not sealed, whatever the local clock shows") {
    Fixture f;
    f.peers.lenders.front().holds = false;
    REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
    f.complete();
    f.complete();

    CHECK(f.here(keys(1, 2)) == 0);
    CHECK(f.fetches->stats().blocks == 0);
    CHECK(f.source->stats().unconfirmed == 2);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("blocks that were read before a reset are not sealed after it") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
    REQUIRE(f.service->reset_cache(f.engine));
    f.complete();
    f.complete();

    CHECK(f.here(keys(1, 2)) == 0);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE(
      "after the end of a claim no more of its blocks are read, and those that were are kept") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);

    f.unclaim(kOne);
    f.complete();
    CHECK(f.fabric.batches.size() == 1);
    f.complete();

    CHECK(f.fabric.batches.empty());
    CHECK(f.here(keys(1, 6)) == 2);
    CHECK(f.fetches->stats().blocks == 2);
    CHECK(f.fetches->stats().unwanted == 4);
    CHECK(f.fetches->stats().given_up == 0);
    f.check_rest();
  }

  TEST_CASE("of an ended claim only the blocks that another claim waits for are read") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    REQUIRE(f.claim(kTwo, keys(1, 4)) == 4);

    f.unclaim(kOne);
    for (int i = 0; i < 4; ++i) f.complete();

    CHECK(f.fabric.batches.empty());
    CHECK(f.here(keys(1, 6)) == 4);
    CHECK(f.fetches->stats().unwanted == 2);
    CHECK(f.peers.lenders.front().leases == 1);
    f.check_rest();
  }

  TEST_CASE("a failed block is not requested from another owner when no claim waits for it") {
    Fixture f;
    f.peers.lenders.resize(2);
    REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
    const std::size_t questions = f.peers.questions;
    f.complete(Errc::kPeerLost);
    CHECK(f.peers.questions == questions + 1);
    CHECK(f.fetches->stats().retried == 1);

    f.unclaim(kOne);
    f.complete(Errc::kPeerLost);
    CHECK(f.peers.questions == questions + 1);
    CHECK(f.fetches->stats().unwanted == 1);
    f.complete();
    f.check_rest();
  }

  TEST_CASE("the age of the oldest read is reported until it is quiesced") {
    Fixture f;
    CHECK(f.source->stats().oldest == Duration::zero());
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    f.clock.advance(std::chrono::milliseconds(300));
    f.complete();
    f.clock.advance(std::chrono::milliseconds(200));

    CHECK(f.source->stats().oldest == std::chrono::milliseconds(500));
    f.complete();
    CHECK(f.source->stats().oldest == std::chrono::milliseconds(200));
    f.complete();
    CHECK(f.source->stats().oldest == Duration::zero());
    f.check_rest();
  }

  TEST_CASE("leases share the places at the fabric, and waiting ones get theirs") {
    Fixture f(1);
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    REQUIRE(f.claim(kTwo, keys(2, 3)) == 3);
    // Blocks that wait for a place are not read either when no claim waits for them.
    f.unclaim(kOne);
    for (int i = 0; i < 4; ++i) {
      CHECK(f.fabric.batches.size() == 1);
      f.complete();
    }

    CHECK(f.here(keys(1, 3)) == 1);
    CHECK(f.here(keys(2, 3)) == 3);
    CHECK(f.fetches->stats().unwanted == 2);
    f.check_rest();
  }

  TEST_CASE("owners take turns where places at the fabric are short") {
    Fixture f(1);
    f.peers.lenders.resize(4);
    for (std::uint64_t owner = 0; owner < 4; ++owner) {
      f.peers.best = owner;
      REQUIRE(f.claim(Id128{5, owner}, keys(owner, 3)) == 3);
    }
    for (int i = 0; i < 4; ++i) f.complete();

    for (std::uint64_t owner = 0; owner < 4; ++owner) CHECK(f.here(keys(owner, 3)) == 1);
    for (int i = 0; i < 8; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("blocks that are computed sooner than they arrive are not fetched") {
    Fixture f;
    f.measure();
    const std::uint64_t leases = f.peers.lenders.front().leases;

    CHECK(f.claim(kOne, keys(1, 4), milliseconds(9)).blocks == 0);
    CHECK(f.peers.lenders.front().leases == leases);
    CHECK(f.fetches->stats().declined == 4);

    const auto fetched = f.claim(kTwo, keys(1, 4), milliseconds(11));
    CHECK(fetched.blocks == 4);
    CHECK(fetched.arrival.first == milliseconds(10) + cluster::SourceRate::kLatency);
    CHECK(fetched.arrival.last == milliseconds(40) + cluster::SourceRate::kLatency);
    for (int i = 0; i < 4; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE(
      "a prediction counts the bytes queued at a node, and the delay before the engine computes") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);

    CHECK(f.claim(kTwo, keys(2, 4), milliseconds(20)).blocks == 0);
    const auto fetched = f.claim(kTwo, keys(2, 4), milliseconds(20), milliseconds(30));
    CHECK(fetched.blocks == 4);
    CHECK(fetched.arrival.first == milliseconds(70) + cluster::SourceRate::kLatency);
    CHECK(fetched.arrival.last == milliseconds(100) + cluster::SourceRate::kLatency);
    for (int i = 0; i < 10; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("claims that request leases at the same time count each other's bytes") {
    Fixture f;
    f.measure();
    const cluster::ComputeTime slow{.delay = {}, .per_block = milliseconds(25)};
    const std::vector<BlockKey> one = keys(1, 4);
    const std::vector<BlockKey> two = keys(2, 4);
    auto first = f.extend(kOne, one, slow);
    auto second = f.extend(kTwo, two, slow);

    CHECK(first.wait(f.io.waitScope).arrival.last ==
          milliseconds(40) + cluster::SourceRate::kLatency);
    CHECK(second.wait(f.io.waitScope).arrival.last ==
          milliseconds(80) + cluster::SourceRate::kLatency);
    for (int i = 0; i < 8; ++i) f.complete();
    CHECK(f.source->rate(f.peers.lenders.front())->queued_bytes() == 0);
    f.check_rest();
  }

  TEST_CASE("a node whose rate is unknown is probed with one batch, and with one at a time") {
    Fixture f;
    const auto probe = f.claim(kOne, keys(1, 6), milliseconds(3));
    CHECK(probe.blocks == 1);
    CHECK(probe.arrival.last == milliseconds(3));
    CHECK(f.claim(kTwo, keys(2, 6), milliseconds(3)).blocks == 0);

    f.clock.advance(milliseconds(1));
    f.complete();
    CHECK(f.claim(kTwo, keys(2, 6), milliseconds(3)).blocks == 6);
    for (int i = 0; i < 6; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("a slow node is probed again when its rate is 10 s old, and a fast one is not") {
    Fixture f;
    f.measure();
    f.clock.advance(cluster::SourceRate::kBelieved);
    CHECK(f.claim(kOne, keys(1, 6), milliseconds(20)).blocks == 6);
    for (int i = 0; i < 6; ++i) {
      f.clock.advance(milliseconds(10));
      f.complete();
    }
    CHECK(f.claim(kTwo, keys(2, 6), milliseconds(5)).blocks == 0);

    f.clock.advance(cluster::SourceRate::kBelieved);
    CHECK(f.claim(kTwo, keys(2, 6), milliseconds(5)).blocks == 1);
    f.clock.advance(milliseconds(1));
    f.complete();
    f.unclaim(kTwo);

    // It is fast again, and the earlier measurement does not count.
    CHECK(f.claim(kThree, keys(3, 6), milliseconds(5)).blocks == 6);
    for (int i = 0; i < 6; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("a block that is in flight for another claim is joined, however slow it is") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);

    const auto joined = f.claim(kTwo, keys(1, 4), microseconds(1));

    CHECK(joined.blocks == 4);
    CHECK(joined.arrival.last == milliseconds(40) + cluster::SourceRate::kLatency);
    for (int i = 0; i < 4; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("an owner is read in the order of the claims, whatever else waits") {
    Fixture f;
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 3)) == 3);
    REQUIRE(f.claim(kTwo, keys(2, 3)) == 3);
    for (int i = 0; i < 3; ++i) f.complete();

    CHECK(f.here(keys(1, 3)) == 3);
    CHECK(f.here(keys(2, 3)) == 0);
    for (int i = 0; i < 3; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("a read that was given up leaves its place at the fabric to a waiting one") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
    REQUIRE(f.claim(kTwo, keys(2, 2)) == 2);
    const std::uint64_t first = f.fabric.batches.front().ticket;
    f.complete(Errc::kTimeout, false);
    f.complete(Errc::kTimeout, false);

    REQUIRE(f.fabric.batches.size() == 2);
    f.complete();
    f.complete();
    CHECK(f.here(keys(2, 2)) == 2);
    f.settle(first);
    f.settle(first + 1);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("a batch is what arrives in 2 ms, and 6 ms are at the fabric") {
    Fixture f(256, {.batch_bytes = 8 * kPage});
    REQUIRE(f.claim(kMeasured, keys(99, 8)) == 8);
    REQUIRE(f.fabric.batches.size() == 1);  // The rate is unknown: the largest batch.
    f.clock.advance(microseconds(7900));    // A little more than a block a millisecond.
    f.complete();
    f.unclaim(kMeasured);

    REQUIRE(f.claim(kOne, keys(1, 16)) == 16);

    CHECK(f.fabric.batches.size() == 3);
    CHECK(f.fabric.batches.front().chunks.size() == 2);
    for (int i = 0; i < 8; ++i) {
      f.clock.advance(milliseconds(2));
      f.complete();
    }
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("it ends with batches that were never given to the fabric") {
    Fixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    f.fetches.reset();
    CHECK(f.fabric.batches.size() == 2);
  }
}

}  // namespace
}  // namespace pegaflow::testing
