// What a tier below the pool sees of a BlockStore: blocks that come and go, and the next victims.
#include <algorithm>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "engine/eviction/eviction.h"
#include "engine/ssd/proof.h"
#include "tests/unit/engine/store_fixture.h"

namespace pegaflow::engine {
namespace {

using testing::keys;
using testing::kPage;
using testing::pool_of;
using testing::StoreFixture;
using testing::token;

/// Notes the frames whose blocks are there, as a tier does.
class Listener final : public BlockListener {
 public:
  void sealed(FrameIndex frame, From from) override {
    CHECK(present.insert(frame).second);
    last_from = from;
  }
  void dropped(FrameIndex frame, bool is_evicted) override {
    CHECK(present.erase(frame) == 1);
    evicted += is_evicted ? 1 : 0;
  }
  std::set<FrameIndex> present;
  std::size_t evicted = 0;
  From last_from = From::kEngine;
};

/// A proof of some block: the store only requires that there is one.
ssd::Proven proven() {
  const ssd::Origin origin{.name = {}, .kind = 0, .epoch = {}};
  const BlockKey key = keys(0, 1)[0];
  const std::vector<std::uint64_t> checksums = {1};
  return *ssd::Proven::prove(origin, key, 1, checksums, ssd::proof_of(origin, key, 1, checksums));
}

std::vector<BlockKey> keys_of(const BlockStore& store, const std::vector<FrameIndex>& frames) {
  std::vector<BlockKey> found;
  for (const FrameIndex frame : frames) found.push_back(store.resident(frame)->key);
  return found;
}

TEST_SUITE("BlockStore, a tier below") {
  TEST_CASE(
      "each block that is sealed, evicted, reset or invalidated is reported to the listener") {
    StoreFixture f(pool_of(4));
    Listener listener;
    f.store->set_listener(&listener);
    const auto first = f.save(keys(0, 4));
    CHECK(listener.present == std::set<FrameIndex>(first.begin(), first.end()));

    f.save(keys(10, 2));

    CHECK(listener.evicted == 2);
    CHECK(listener.present.size() == 4);
    CHECK(f.store->invalidate(*listener.present.begin()));
    CHECK(listener.present.size() == 3);
    f.store->retire_space(f.space);
    while (f.store->work()) {
    }
    CHECK(listener.present.empty());
    CHECK(listener.evicted == 2);
    f.store->set_listener(nullptr);
  }

  TEST_CASE("an unreferenced block whose bytes are wrong is a miss, and its frame is free") {
    StoreFixture f(pool_of(4));
    const auto frames = f.save(keys(0, 3));

    CHECK(f.store->invalidate(frames[1]));

    CHECK_FALSE(f.store->invalidate(frames[1]));
    CHECK(f.store->lookup(f.space, keys(0, 3)) == 1);
    CHECK(f.store->stats().invalidated == 1);
    CHECK(f.free() == 2);
    CHECK(f.store->check());
  }

  TEST_CASE("a restored block is no replica: it is evicted as if it had been saved") {
    StoreFixture f(pool_of(4));
    f.save(keys(0, 1));
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 2), 2).value();
    REQUIRE(made.frames.size() == 1);
    Listener listener;
    f.store->set_listener(&listener);

    CHECK(f.store->restored(made.frames[0].frame, proven()));

    CHECK(listener.last_from == BlockListener::From::kDisk);
    f.store->set_listener(nullptr);
    CHECK(f.store->stats().replicas == 0);
    CHECK_FALSE(f.store->resident(made.frames[0].frame)->is_replica);
    f.store->unclaim(f.holder, token(1));
    f.save(keys(20, 3));  // One of two has to go: the first, which was used at the same time.
    CHECK(f.store->stats().evicted_replicas == 0);
    CHECK(f.store->check());
  }

  TEST_CASE("a block that was read from a disk for another node is evicted first, as a replica") {
    StoreFixture f(pool_of(4));
    f.save(keys(0, 2));
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(10, 1), 1).value();
    REQUIRE(made.frames.size() == 1);
    Listener listener;
    f.store->set_listener(&listener);

    CHECK(f.store->staged(made.frames[0].frame, proven()));

    CHECK(listener.last_from == BlockListener::From::kNode);  // It is not written to a disk again.
    f.store->set_listener(nullptr);
    CHECK(f.store->resident(made.frames[0].frame)->is_replica);
    f.store->unclaim(f.holder, token(1));
    f.save(keys(20, 2));
    CHECK(f.store->stats().evicted_replicas == 1);
    CHECK(f.store->lookup(f.space, keys(0, 2)) == 2);
    CHECK(f.store->check());
  }

  TEST_CASE("the next victims are those that saves of so many bytes evict, in their order") {
    for (const EvictionKind kind : {EvictionKind::kLru, EvictionKind::kSlru}) {
      CAPTURE(to_string(kind));
      auto options = pool_of(8);
      options.eviction = kind;
      StoreFixture f(options);
      f.save(keys(0, 7));
      REQUIRE(f.store->claim(f.holder, f.space, keys(0, 3), token(1)) == 3);
      f.store->unclaim(f.holder, token(1));
      std::vector<FrameIndex> next;
      f.store->next_victims(4 * kPage, 100, next);
      const std::vector<BlockKey> forecast = keys_of(*f.store, next);
      CHECK(forecast.size() == 3);  // One frame is free.

      Listener listener;
      std::vector<FrameIndex> all = f.store->residents();
      listener.present = std::set<FrameIndex>(all.begin(), all.end());
      f.store->set_listener(&listener);
      f.save(keys(20, 4));

      CHECK(listener.evicted == 3);
      for (const BlockKey& key : forecast) {
        CHECK(f.store->lookup(f.space, std::vector<BlockKey>{key}) == 0);
      }
      f.store->set_listener(nullptr);
    }
  }

  TEST_CASE("while all that is saved next fits the free frames there is no victim") {
    StoreFixture f(pool_of(8));
    f.save(keys(0, 4));
    std::vector<FrameIndex> next;

    f.store->next_victims(4 * kPage, 100, next);
    CHECK(next.empty());

    f.store->next_victims(6 * kPage, 1, next);
    CHECK(next.size() == 1);  // At most so many as requested.
  }

  TEST_CASE("residents are all blocks but replicas, the last used first") {
    StoreFixture f(pool_of(8));
    f.save(keys(0, 3));
    const auto made = f.store->fetch(f.holder, f.space, token(1), 0, keys(0, 4), 4).value();
    REQUIRE(f.store->fetched(made.frames.at(0).frame));  // A replica.
    f.store->unclaim(f.holder, token(1));
    f.save(keys(10, 1));
    REQUIRE(f.store->claim(f.holder, f.space, keys(0, 1), token(2)) == 1);
    f.store->unclaim(f.holder, token(2));

    const std::vector<BlockKey> found = keys_of(*f.store, f.store->residents());

    REQUIRE(found.size() == 4);
    CHECK(found[0] == keys(0, 1)[0]);
    CHECK(found[1] == keys(10, 1)[0]);
  }
}

TEST_SUITE("EvictionPolicy, forecasts") {
  TEST_CASE("the forecast of a policy is the order of its victims, and changes nothing") {
    for (const EvictionKind kind :
         {EvictionKind::kLru, EvictionKind::kSlru, EvictionKind::kWeightedLru}) {
      CAPTURE(to_string(kind));
      const auto rows = BlockRows::create(64);
      REQUIRE(rows);
      auto made = EvictionPolicy::create(kind, **rows, 64);
      REQUIRE(made);
      EvictionPolicy& policy = **made;
      for (std::uint32_t row = 0; row < 64; ++row) policy.sealed(row, row);
      for (std::uint32_t row = 0; row < 64; row += 3) {
        policy.taken(row);
        policy.released(row);
      }
      std::vector<std::uint32_t> forecast;
      policy.next_victims(1000, forecast);
      REQUIRE(forecast.size() == 64);

      std::size_t right = 0;
      for (const std::uint32_t row : forecast) {
        const std::uint32_t victim = policy.victim();
        right += victim == row ? 1 : 0;
        policy.freed(victim, victim, EvictionPolicy::Freed::kEvicted);
      }

      // Weights of weighted-lru may change with what is evicted.
      CHECK(right >= (kind == EvictionKind::kWeightedLru ? 60 : 64));
      CHECK(policy.victim() == EvictionPolicy::kNone);
    }
  }
}

}  // namespace
}  // namespace pegaflow::engine
