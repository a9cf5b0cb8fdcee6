// Blocks that are fetched before an engine requests them: Prefetches.
#include "server/prefetch/prefetches.h"

#include <memory>
#include <string>

#include <doctest/doctest.h>

#include "tests/unit/server/fetches_fixture.h"

namespace pegaflow::testing {
namespace {

using server::Prefetches;
using server::PrefetchStats;

/// A node with room for 16 prefetched blocks; each owner has two batches of a block at the fabric.
struct PrefetchFixture : Fixture {
  PrefetchFixture() {
    prefetches =
        std::make_unique<Prefetches>(*service, *fetches, *background, io.provider->getTimer(),
                                     clock, Prefetches::Options{.most_bytes = 16 * kPage});
  }
  void start(const std::string& id, const std::vector<BlockKey>& wanted,
             const std::string& tenant = "", const std::vector<Id128>& nodes = {}) {
    const std::string space = service->instances().front().namespace_hash;
    const auto kind = service->indexed(space, std::nullopt);
    REQUIRE(kind);
    prefetches->start(kind->wants, {.id = id, .tenant = tenant, .keys = wanted, .nodes = nodes});
    io.waitScope.poll();
  }
  [[nodiscard]] PrefetchStats stats() {
    io.waitScope.poll();
    return prefetches->stats();
  }

  std::unique_ptr<Prefetches> prefetches;
};

TEST_SUITE("Prefetches") {
  TEST_CASE("blocks arrive as replicas, without a claim of an engine, and nothing holds them") {
    PrefetchFixture f;
    f.start("a", keys(1, 4));
    CHECK(f.stats().running == 1);
    CHECK(f.stats().bytes == 4 * kPage);
    for (int i = 0; i < 4; ++i) f.complete();

    CHECK(f.stats().finished == 1);
    CHECK(f.stats().blocks == 4);
    CHECK(f.stats().bytes == 0);
    CHECK(f.here(keys(1, 4)) == 4);
    CHECK(f.service->stats().store.replicas == 4);
    CHECK(f.service->stats().store.claims == 0);
    f.check_rest();
    f.start("b", keys(1, 4));  // They are here: no node is asked.
    CHECK(f.peers.questions == 1);
    CHECK(f.stats().finished == 2);
  }

  TEST_CASE("an engine's claim that comes meanwhile joins the fetch: each block is read once") {
    PrefetchFixture f;
    f.start("a", keys(1, 6));
    f.complete();

    // One is here, five are in flight.
    REQUIRE(f.service->claim(f.engine, kOne, keys(1, 6)).value().blocks == 1);
    auto extending = f.fetches->extend(f.engine, kOne, keys(1, 6), 1);
    KJ_IF_MAYBE (growth, extending) {
      CHECK(growth->wait(f.io.waitScope).blocks == 5);
    }
    CHECK(f.peers.lenders.front().leases == 1);
    CHECK(f.peers.questions == 1);
    // It stays in flight for the engine when its router gives it up.
    f.prefetches->cancel("a");
    for (int i = 0; i < 5; ++i) f.complete();

    CHECK(f.here(keys(1, 6)) == 6);
    CHECK(f.fetches->stats().blocks == 6);
    CHECK(f.service->stats().store.fetches == 6);
    CHECK(f.service->stats().store.fetches_joined == 5);
    CHECK(f.stats().cancelled == 1);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("cancelling ends the reads that have not begun") {
    PrefetchFixture f;
    f.start("a", keys(1, 8));
    f.prefetches->cancel("a");
    f.prefetches->cancel("a");  // Idempotent.
    while (f.service->work()) {
    }
    f.complete();
    f.complete();

    CHECK(f.fabric.batches.empty());
    CHECK(f.fetches->stats().blocks == 2);
    CHECK(f.fetches->stats().unwanted == 6);
    CHECK(f.stats().cancelled == 1);
    CHECK(f.stats().running == 0);
    f.check_rest();
  }

  TEST_CASE("one that is cancelled before its owner answered takes no frame") {
    PrefetchFixture f;
    const std::string space = f.service->instances().front().namespace_hash;
    f.prefetches->start(f.service->indexed(space, std::nullopt)->wants,
                        {.id = "a", .keys = keys(1, 4)});
    f.prefetches->cancel("a");
    f.io.waitScope.poll();
    while (f.service->work()) {
    }

    CHECK(f.fabric.batches.empty());
    CHECK(f.service->stats().store.fetches == 0);
    f.check_rest();
  }

  TEST_CASE("all together stay within their bytes, and a tenant within a quarter") {
    PrefetchFixture f;
    f.start("a", keys(1, 6), "tenant");
    CHECK(f.stats().bytes == 4 * kPage);
    f.start("b", keys(20, 6), "tenant");
    CHECK(f.stats().rejected == 1);
    f.start("c", keys(30, 20));
    CHECK(f.stats().bytes == 16 * kPage);
    f.start("d", keys(60, 1), "another");
    CHECK(f.stats().rejected == 2);
    f.start("c", keys(70, 1));  // The id is in use.
    CHECK(f.stats().running == 2);
    f.prefetches->cancel("c");
    f.prefetches->cancel("a");
    while (f.service->work()) {
    }
    while (!f.fabric.batches.empty()) f.complete();
    f.start("d", keys(60, 1), "another");
    CHECK(f.stats().running == 1);
    f.complete();
    CHECK(f.stats().bytes == 0);
    f.check_rest();
  }

  TEST_CASE("the named nodes are asked first, and all of them when those have nothing") {
    PrefetchFixture f;
    f.start("a", keys(1, 2), "", {f.peers.knows});
    CHECK(f.peers.asked == std::vector<std::vector<Id128>>{{f.peers.knows}});
    f.start("b", keys(10, 2), "", {kThree});
    CHECK(f.peers.asked == std::vector<std::vector<Id128>>{{f.peers.knows}, {kThree}, {}});
    CHECK(f.fetches->stats().hinted == 2);
    CHECK(f.fetches->stats().wrong_hints == 1);
    for (int i = 0; i < 4; ++i) f.complete();
    CHECK(f.stats().finished == 2);
    f.check_rest();
  }

  TEST_CASE("a reset ends a prefetch, and its blocks are not found") {
    PrefetchFixture f;
    f.start("a", keys(1, 3));
    REQUIRE(f.service->reset_cache(f.engine));
    while (f.service->work()) {
    }
    while (!f.fabric.batches.empty()) f.complete();

    CHECK(f.stats().running == 0);
    CHECK(f.stats().ended == 1);
    CHECK(f.here(keys(1, 3)) == 0);
    f.check_rest();
  }
}

}  // namespace
}  // namespace pegaflow::testing
