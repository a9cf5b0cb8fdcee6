#include "index/placement/waiting_blocks.h"

#include <memory>
#include <span>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::index {
namespace {

std::vector<Key> chain(std::uint64_t from, std::size_t count) {
  std::vector<Key> keys;
  for (std::size_t i = 0; i < count; ++i) keys.push_back(key_of(1, from + i));
  return keys;
}

/// An index with two engines that hold the same 100 blocks.
struct Fleet {
  std::unique_ptr<BlockIndex> blocks =
      std::move(*BlockIndex::create({.max_blocks = 4096, .max_holders = 8}));
  HolderId a = *blocks->add_engine();
  HolderId b = *blocks->add_engine();
  std::vector<Key> keys = chain(1'000, 100);
  WaitingBlocks waiting{*blocks, 8};

  Fleet() {
    blocks->store(a, keys);
    blocks->store(b, keys);
  }
  void evict(HolderId engine, std::size_t from, std::size_t count) {
    blocks->erase(engine, std::span(keys).subspan(from, count));
  }
};

TEST_SUITE("WaitingBlocks") {
  TEST_CASE("a request loses what its engine evicts from the end of its chain") {
    Fleet fleet;
    fleet.waiting.add(1, fleet.a, fleet.keys);
    fleet.waiting.add(2, fleet.a, std::span(fleet.keys).first(60));
    fleet.waiting.add(3, fleet.b, fleet.keys);

    fleet.evict(fleet.a, 90, 10);
    const auto first = fleet.waiting.removed(fleet.a);
    REQUIRE(first.size() == 1);
    CHECK(first[0].request == 1);
    CHECK(first[0].lost == 10);
    fleet.evict(fleet.a, 50, 40);
    CHECK(fleet.waiting.removed(fleet.a).size() == 2);
    CHECK(fleet.waiting.removed(fleet.b).empty());

    CHECK(fleet.waiting.lost(1) == 50);
    CHECK(fleet.waiting.lost(2) == 10);
    CHECK(fleet.waiting.lost(3) == 0);
    CHECK(fleet.waiting.lost(4) == 0);
  }

  TEST_CASE("blocks that the pool of the engine's node has are not lost") {
    Fleet fleet;
    const HolderId pool = *fleet.blocks->add_node();
    fleet.blocks->attach(fleet.a, pool);
    fleet.blocks->store(pool, std::span(fleet.keys).first(95));
    fleet.waiting.add(1, fleet.a, fleet.keys);
    fleet.waiting.add(2, fleet.b, fleet.keys);

    fleet.evict(fleet.a, 80, 20);
    fleet.evict(fleet.b, 80, 20);
    CHECK(fleet.waiting.removed(fleet.a).size() == 1);
    CHECK(fleet.waiting.removed(fleet.b).size() == 1);
    CHECK(fleet.waiting.lost(1) == 5);
    CHECK(fleet.waiting.lost(2) == 20);
  }

  TEST_CASE("blocks that come back after they were evicted stay lost") {
    Fleet fleet;
    fleet.waiting.add(1, fleet.a, fleet.keys);
    fleet.evict(fleet.a, 70, 30);
    CHECK(fleet.waiting.removed(fleet.a).size() == 1);
    fleet.blocks->store(fleet.a, std::span(fleet.keys).subspan(70));
    fleet.waiting.removed(fleet.a);
    CHECK(fleet.waiting.lost(1) == 30);
  }

  TEST_CASE("what an engine evicts after it has begun with a request is not lost") {
    Fleet fleet;
    fleet.waiting.add(1, fleet.a, fleet.keys);
    fleet.waiting.add(2, fleet.a, fleet.keys);
    fleet.evict(fleet.a, 90, 10);
    CHECK(fleet.waiting.removed(fleet.a).size() == 2);
    CHECK(fleet.waiting.blocks() == 180);
    fleet.waiting.begun(1);
    fleet.waiting.begun(3);
    CHECK(fleet.waiting.blocks() == 90);
    fleet.evict(fleet.a, 0, 90);
    const auto losses = fleet.waiting.removed(fleet.a);
    REQUIRE(losses.size() == 1);
    CHECK(losses[0].request == 2);
    CHECK(fleet.waiting.lost(1) == 10);
    CHECK(fleet.waiting.lost(2) == 100);
    fleet.waiting.remove(1);
    fleet.waiting.remove(2);
    CHECK(fleet.waiting.size() == 0);
    CHECK(fleet.waiting.blocks() == 0);
  }

  TEST_CASE("requests that end, and engines of which nothing is known, are forgotten") {
    Fleet fleet;
    fleet.waiting.add(1, fleet.a, fleet.keys);
    fleet.waiting.add(1, fleet.a, fleet.keys);  // It is known already.
    fleet.waiting.add(2, fleet.a, fleet.keys);
    fleet.waiting.add(3, fleet.b, fleet.keys);
    CHECK(fleet.waiting.blocks() == 300);
    fleet.waiting.remove(1);
    fleet.waiting.remove(1);
    fleet.waiting.forget(fleet.a);
    fleet.waiting.remove(2);
    CHECK(fleet.waiting.size() == 1);
    CHECK(fleet.waiting.blocks() == 100);
    fleet.evict(fleet.a, 0, 100);
    CHECK(fleet.waiting.removed(fleet.a).empty());
  }

  TEST_CASE("beyond its limit requests are not followed") {
    Fleet fleet;
    for (std::uint64_t id = 1; id <= WaitingBlocks::kMaxRequests + 10; ++id) {
      fleet.waiting.add(id, fleet.a, std::span(fleet.keys).first(1));
    }
    CHECK(fleet.waiting.size() == WaitingBlocks::kMaxRequests);
    CHECK(fleet.waiting.lost(WaitingBlocks::kMaxRequests + 5) == 0);
  }
}

}  // namespace
}  // namespace pegaflow::index
