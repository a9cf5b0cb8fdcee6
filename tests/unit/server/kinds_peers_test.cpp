// Lookups and claims over several kinds of blocks, of which nodes that the test plays have some.
#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"
#include "tests/unit/server/kinds_peers_fixture.h"

namespace pegaflow::testing {
namespace {

TEST_SUITE("kinds at peers") {
  TEST_CASE("a prompt whose blocks are all at a peer is claimed whole, and its blocks arrive") {
    KindsPeers f;
    f.give_eight(0, 1);
    CHECK(f.restorable(1, 8) == 0);
    CHECK(f.reach(1, 8) == 8);
    CHECK(f.lenders[0].leases == 0);

    const Claim claim = f.claim_from_peers(kOne, 1, 8);
    CHECK(claim.claimed.units == 8);
    CHECK(claim.claimed.complete);
    CHECK(text(claim.claimed) == kEight);
    CHECK(f.service->stats().store.in_flight == 12);
    CHECK_FALSE(f.open(kOne, kState, 0, 1, 1));
    f.complete_all();

    CHECK(f.open_count(kOne, kFull, 8) == 8);
    CHECK(f.open_count(kOne, kWindow, 3) == 3);
    CHECK(f.open_count(kOne, kState, 1) == 1);
    CHECK(f.fetches->stats().bytes == (8 + 3 + 2) * kPage);
    CHECK(f.fetches->stats().claims_coming == 1);
    f.end(kOne);
    CHECK(f.restorable(1, 8) == 8);
    f.check_rest();
  }

  TEST_CASE(
      "blocks of this node and of one peer make a boundary, and only the missing ones are read") {
    KindsPeers f;
    f.save(kFull, 1, {0, 1, 2, 3, 4});
    f.save(kWindow, 1, {6});
    f.give(0, kFull, 1, {5, 6, 7});
    f.give(0, kWindow, 1, {5, 7});
    f.give(0, kState, 1, {3});

    const Claim claim = f.claim_from_peers(kOne, 1, 8);
    CHECK(text(claim.claimed) == kEight);
    CHECK(f.fetches->stats().bytes == 0);
    f.complete_all();
    CHECK(f.fetches->stats().bytes == (3 + 2 + 2) * kPage);
    CHECK(f.open_count(kOne, kWindow, 3) == 3);
    f.end(kOne);
    f.check_rest();
  }

  TEST_CASE("blocks of all kinds that are on the disks of a peer are claimed whole, and arrive") {
    KindsPeers f;
    f.give_eight(0, 1);
    f.lenders[0].in_pool = 2;  // Of each kind the first two.
    const Claim claim = f.claim_from_peers(kOne, 1, 8);
    REQUIRE(claim.claimed.units == 8);
    CHECK(f.lenders[0].stagings == 2);  // The one state is in the pool.
    f.complete_all();
    CHECK(f.open_count(kOne, kFull, 8) == 0);

    while (const auto asked = f.lenders[0].asked()) {
      f.lenders[0].lend_pending(std::min<std::size_t>(2, asked->pending), 50);
      f.io.waitScope.poll();
      f.complete_all();
    }

    CHECK(f.source->stats().pending == 7);
    CHECK(f.open_count(kOne, kFull, 8) == 8);
    CHECK(f.open_count(kOne, kWindow, 3) == 3);
    CHECK(f.open_count(kOne, kState, 1) == 1);
    f.end(kOne);
    CHECK(f.restorable(1, 8) == 8);
  }

  TEST_CASE("blocks of this node may lie between those of a peer") {
    KindsPeers f;
    f.save(kFull, 1, {5, 6});
    f.give(0, kFull, 1, {0, 1, 2, 3, 4, 7});
    f.give(0, kWindow, 1, {5, 6, 7});
    f.give(0, kState, 1, {3});
    CHECK(f.reach(1, 8) == 8);
    CHECK(text(f.claim_from_peers(kOne, 1, 8).claimed) == kEight);
    f.complete_all();
    CHECK(f.fetches->stats().bytes == (6 + 3 + 2) * kPage);
    CHECK(f.open_count(kOne, kFull, 8) == 8);
    f.end(kOne);
    f.check_rest();
  }

  TEST_CASE("a boundary whose blocks are divided over two peers is not offered") {
    KindsPeers f(2);
    f.give(0, kFull, 1, {0, 1, 2, 3, 4, 5, 6, 7});
    f.give(0, kWindow, 1, {5, 6, 7});
    f.give(1, kState, 1, {3});
    CHECK(f.reach(1, 8) == 0);
    CHECK(f.claim_from_peers(kOne, 1, 8).claimed.units == 0);
    CHECK(f.lenders[0].leases + f.lenders[1].leases == 0);

    // A shorter one that the first peer has alone is.
    f.give(0, kWindow, 1, {1, 2, 3});
    f.give(0, kState, 1, {1});
    CHECK(f.reach(1, 8) == 4);
    CHECK(text(f.claim_from_peers(kOne, 1, 8).claimed) == "0:0+4 1:1+3 2:1+1");
    f.complete_all();
    f.end(kOne);
    f.check_rest();
  }

  TEST_CASE("the peer with the longest boundary is chosen") {
    KindsPeers f(3);
    for (const std::size_t peer : {0U, 1U, 2U}) {
      f.give(peer, kFull, 1, {0, 1, 2, 3, 4, 5, 6, 7});
      f.give(peer, kWindow, 1, {0, 1, 2, 3, 4, 5, 6, 7});
    }
    f.give(0, kState, 1, {0});
    f.give(1, kState, 1, {2});
    f.give(2, kState, 1, {1});
    CHECK(f.claim_from_peers(kOne, 1, 8).claimed.units == 6);
    CHECK(f.lenders[0].leases == 0);
    CHECK(f.lenders[1].leases == 3);
    CHECK(f.lenders[2].leases == 0);
    f.complete_all();
    f.end(kOne);
    f.check_rest();
  }

  TEST_CASE("whatever blocks are where, the longest boundary of this node and one peer is found") {
    std::mt19937_64 random(seed());
    constexpr std::size_t kUnits = 12;
    const auto blocks_of = [](std::size_t kind) { return kind == kState ? kUnits / 2 : kUnits; };
    std::size_t longer = 0;
    for (int round = 0; round < 200; ++round) {
      KindsPeers f(2);
      // Prefixes, some with blocks behind holes, and any windows and states.
      const auto some = [&](std::size_t kind) {
        std::vector<std::size_t> blocks;
        const std::size_t prefix = random() % (kUnits + 1);
        const bool has_holes = random() % 2 != 0;
        for (std::size_t block = 0; block < blocks_of(kind); ++block) {
          const bool is_there = random() % 3 != 0;
          const bool is_in_prefix = block < prefix || (has_holes && is_there);
          if (kind == kFull ? is_in_prefix : is_there) blocks.push_back(block);
        }
        return blocks;
      };
      std::set<std::pair<std::size_t, std::size_t>> here;
      std::vector<std::set<std::pair<std::size_t, std::size_t>>> there(2);
      for (const std::size_t kind : {kFull, kWindow, kState}) {
        const auto own = some(kind);
        if (!own.empty()) f.save(kind, 1, own);
        for (const std::size_t block : own) here.insert({kind, block});
        for (const std::size_t peer : {0U, 1U}) {
          const auto its = some(kind);
          f.give(peer, kind, 1, its);
          for (const std::size_t block : its) there[peer].insert({kind, block});
        }
      }
      const std::size_t local = random() % 3 * 2;
      const engine::BlockKinds rules = f.service->wants_of_kinds(f.scheduler, 0).value().rules;
      const auto is_restorable = [&](std::size_t units, const auto& peer) {
        for (const std::size_t kind : {kFull, kWindow, kState}) {
          const auto range = engine::BlockKinds::needed(rules.kinds[kind], units * 16);
          for (std::size_t block = range.first; block < range.end(); ++block) {
            const std::pair<std::size_t, std::size_t> each(kind, block);
            const bool is_needed = kind != kFull || block >= local;
            if (is_needed && !here.contains(each) && !peer.contains(each)) return false;
          }
        }
        return true;
      };
      std::size_t expected = 0;
      for (std::size_t units = local + 2; units <= kUnits; units += 2) {
        if (is_restorable(units, there[0]) || is_restorable(units, there[1])) expected = units;
      }
      const std::size_t own = f.restorable(1, kUnits, local);
      longer += expected > own ? 1 : 0;
      CHECK(std::max(own, f.reach(1, kUnits, local)) == expected);
      f.check_rest();
    }
    CHECK(longer > 50);
  }

  TEST_CASE("nothing is claimed when no peer has a longer boundary than this node") {
    KindsPeers f;
    f.save_eight(1);
    f.give(0, kFull, 1, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
    f.give(0, kState, 1, {4});
    CHECK(f.reach(1, 10) == 0);
    const Claim claim = f.claim_from_peers(kOne, 1, 10);
    CHECK(claim.claimed.units == 0);
    CHECK_FALSE(claim.is_ended);
    CHECK(f.claim(kOne, 1, 10)->units == 8);
    // For a prompt that no peer knows, only the keys of the prefix are sent.
    const std::size_t asked = f.lenders[0].each_asked.size();
    CHECK(f.reach(2, 8) == 0);
    CHECK(f.lenders[0].each_asked.size() == asked);
    REQUIRE(f.service->unclaim(f.scheduler, kOne));
    f.check_rest();
  }

  TEST_CASE("a prompt that is restorable here to its end asks no peer") {
    KindsPeers f;
    f.save_eight(1);
    f.give_eight(0, 1);
    const auto units = prompt(1, 9);  // The last unit ends at no boundary.
    CHECK(f.fetches->reach_kinds(f.scheduler, units, 0) == nullptr);
    CHECK(f.fetches->claim_kinds(f.scheduler, kOne, units, 0) == nullptr);
    f.check_rest();
  }

  TEST_CASE("a peer that no longer lends one block of a kind: no block of any kind is claimed") {
    KindsPeers f;
    f.give_eight(0, 1);
    f.lenders[0].before_lease = [&f]() {
      std::erase_if(f.has[0], [&](const auto& each) { return each.first == f.space(kState); });
    };
    CHECK(f.claim_from_peers(kOne, 1, 8).claimed.units == 0);
    CHECK(f.service->stats().store.fetches == 0);
    f.check_rest();
  }

  TEST_CASE("a block that was evicted here while the peer was asked: nothing is claimed") {
    KindsPeers f;
    f.save(kFull, 1, {0, 1});
    f.give(0, kFull, 1, {2, 3, 4, 5, 6, 7});
    f.give(0, kWindow, 1, {5, 6, 7});
    f.give(0, kState, 1, {3});
    f.lenders[0].before_lease = [&f]() {
      f.service->store().start_cleanup();
      f.work();
    };
    CHECK(f.claim_from_peers(kOne, 1, 8).claimed.units == 0);
    CHECK(f.fabric.batches.empty());
    CHECK(f.fetches->stats().claims_coming == 0);
    f.check_rest();
  }

  TEST_CASE("where the share of fetches is too small for all blocks, none is claimed") {
    engine::BlockStore::Options store = kStore;
    store.fetch_share = 10.0 / 256;
    KindsPeers f(1, store);
    f.give_eight(0, 1);
    CHECK(f.reach(1, 8) == 0);
    CHECK(f.claim_from_peers(kOne, 1, 8).claimed.units == 0);
    CHECK(f.lenders[0].leases == 0);
    CHECK(f.service->stats().store.claims == 0);
    f.check_rest();
  }

  TEST_CASE("a claim that cannot be fetched whole evicts nothing") {
    engine::BlockStore::Options store = kStore;
    store.pool_bytes = 48 * kPage;
    store.fetch_share = 12.5 / 48;  // The prompt takes 13 pages.
    KindsPeers f(1, store);
    std::vector<std::size_t> own(48);
    std::iota(own.begin(), own.end(), 0);
    f.save(kFull, 2, own);
    f.give_eight(0, 1);
    CHECK(f.claim_from_peers(kOne, 1, 8).claimed.units == 0);
    f.work();
    CHECK(f.service->stats().store.sealed == 48);
    // With one block here the others have room.
    f.save(kFull, 1, {0});
    CHECK(f.reach(1, 8) == 8);
    CHECK(f.claim_from_peers(kOne, 1, 8).claimed.units == 8);
    f.complete_all();
    f.end(kOne);
    f.check_rest();
  }

  TEST_CASE("of two claims that have room for one alone, the second one takes no frame") {
    engine::BlockStore::Options store = kStore;
    store.fetch_share = 20.5 / 256;  // Each of them takes 13 pages.
    KindsPeers f(1, store);
    f.give_eight(0, 1);
    f.give_eight(0, 2);
    auto first = f.claiming(kOne, 1, 8);
    auto second = f.claiming(kTwo, 2, 8);
    CHECK(first.wait(f.io.waitScope).claimed.units + second.wait(f.io.waitScope).claimed.units ==
          8);
    CHECK(f.service->stats().store.fetches == 12);
    f.complete_all();
    f.end(kOne);
    f.end(kTwo);
    f.check_rest();
  }

  TEST_CASE("a long prompt is claimed in slices, whole") {
    engine::BlockStore::Options store = kStore;
    store.pool_bytes = 4096 * kPage;
    KindsPeers f(1, store);
    std::vector<std::size_t> blocks(700);
    std::iota(blocks.begin(), blocks.end(), 0);
    f.give(0, kFull, 1, blocks);
    f.give(0, kWindow, 1, {697, 698, 699});
    f.give(0, kState, 1, {349});
    CHECK(text(f.claim_from_peers(kOne, 1, 700).claimed) == "0:0+700 1:697+3 2:349+1");
    CHECK(f.service->stats().store.in_flight == 704);
    f.complete_all();
    CHECK(f.open_count(kOne, kFull, 700) == 700);
    CHECK(f.open_count(kOne, kState, 1) == 1);
    f.end(kOne);
    f.check_rest();
  }

  TEST_CASE("an owner that lends less at a time is asked for the rest, with a limit") {
    KindsPeers f;
    f.give_eight(0, 1);
    f.lenders[0].most_per_lease = 3;
    REQUIRE(f.claim_from_peers(kOne, 1, 8).claimed.units == 8);
    CHECK(f.lenders[0].leases == 3 + 1 + 1);
    f.complete_all();
    CHECK(f.open_count(kOne, kFull, 8) == 8);
    f.end(kOne);
    f.check_rest();

    f.give(0, kFull, 2, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
    f.give(0, kWindow, 2, {7, 8, 9});
    f.give(0, kState, 2, {4});
    f.lenders[0].most_per_lease = 1;
    CHECK(f.claim_from_peers(kTwo, 2, 10).claimed.units == 0);
    f.check_rest();
  }

  TEST_CASE("of a shard that has no page of a kind nothing is read") {
    Registration first = full_window_state();
    first.ranks = first.shards = 2;
    Registration second = first;
    second.rank = second.shard = 1;
    second.kinds[kState].page_bytes = 0;
    KindsPeers f(1, kStore, first);
    REQUIRE(f.service->register_rank(f.connect(), second));
    f.give_eight(0, 1);
    REQUIRE(f.claim_from_peers(kOne, 1, 8).claimed.units == 8);
    f.complete_all();
    CHECK(f.fetches->stats().bytes == (2 * 8 + 2 * 3 + 2) * kPage);
    CHECK(f.open_count(kOne, kState, 1) == 1);
    f.end(kOne);
    f.check_rest();
  }

  TEST_CASE("a block that does not arrive cannot be opened, and the others can") {
    KindsPeers f;
    f.give_eight(0, 1);
    REQUIRE(f.claim_from_peers(kOne, 1, 8).claimed.units == 8);
    const std::uint64_t state = 2 * kPage;
    while (!f.fabric.batches.empty()) {
      const bool is_state = f.fabric.batches.front().chunks.front().size_bytes == state;
      f.complete(is_state ? std::optional(Errc::kInternal) : std::nullopt);
    }
    CHECK(f.open_count(kOne, kFull, 8) == 8);
    const auto opened = f.open(kOne, kState, 0, 1, 1);
    REQUIRE_FALSE(opened);
    CHECK(opened.error().code == Errc::kGone);
    f.end(kOne);
    CHECK(f.restorable(1, 8) == 0);
    f.check_rest();
  }

  TEST_CASE("a failed block is read from another peer that has it") {
    KindsPeers f(2);
    f.give_eight(0, 1);
    f.give(1, kState, 1, {3});
    REQUIRE(f.claim_from_peers(kOne, 1, 8).claimed.units == 8);
    bool has_failed = false;
    while (!f.fabric.batches.empty()) {
      const bool is_state = f.fabric.batches.front().chunks.front().size_bytes == 2 * kPage;
      const bool fails = is_state && !std::exchange(has_failed, has_failed || is_state);
      f.complete(fails ? std::optional(Errc::kInternal) : std::nullopt);
    }
    CHECK(f.fetches->stats().retried == 1);
    CHECK(f.open_count(kOne, kState, 1) == 1);
    f.end(kOne);
    CHECK(f.restorable(1, 8) == 8);
    f.check_rest();
  }

  TEST_CASE("a reset before the frames are taken: nothing is claimed") {
    KindsPeers f;
    f.give_eight(0, 1);
    f.lenders[0].before_lease = [&f]() { REQUIRE(f.service->reset_cache(f.scheduler)); };
    CHECK(f.claim_from_peers(kOne, 1, 8).claimed.units == 0);
    f.check_rest();
  }

  TEST_CASE("a reset while blocks are read: none of them is found after it") {
    KindsPeers f;
    f.give_eight(0, 1);
    REQUIRE(f.claim_from_peers(kOne, 1, 8).claimed.units == 8);
    REQUIRE(f.service->reset_cache(f.scheduler));
    f.complete_all();
    CHECK(f.restorable(1, 8) == 0);
    CHECK_FALSE(f.open(kOne, kFull, 0, 8, 1));
    f.end(kOne);
    f.check_rest();
  }

  TEST_CASE("a claim that ends while its peer is asked takes no frame") {
    KindsPeers f;
    f.give_eight(0, 1);
    f.lenders[0].before_lease = [&f]() { f.end(kOne); };
    const Claim claim = f.claim_from_peers(kOne, 1, 8);
    CHECK(claim.claimed.units == 0);
    CHECK(claim.is_ended);
    CHECK(f.service->stats().store.fetches == 0);
    f.check_rest();
  }

  TEST_CASE("an engine that leaves while its peer is asked leaves nothing in flight") {
    KindsPeers f;
    f.give_eight(0, 1);
    f.lenders[0].before_lease = [&f]() { f.service->disconnected(f.scheduler); };
    CHECK(f.claim_from_peers(kOne, 1, 8).claimed.units == 0);
    f.check_rest();
  }

  TEST_CASE("two claims on one prompt share the reads") {
    KindsPeers f;
    f.give_eight(0, 1);
    REQUIRE(f.claim_from_peers(kOne, 1, 8).claimed.units == 8);
    REQUIRE(f.claim_from_peers(kTwo, 1, 8).claimed.units == 8);
    CHECK(f.service->stats().store.fetches == 12);
    f.end(kOne);
    f.complete_all();
    CHECK(f.fetches->stats().blocks == 12);
    CHECK(f.open_count(kTwo, kState, 1) == 1);
    f.end(kTwo);
    f.check_rest();
  }

  TEST_CASE("the end of one kind's claim ends all of them") {
    KindsPeers f;
    f.give_eight(0, 1);
    REQUIRE(f.claim_from_peers(kOne, 1, 8).claimed.units == 8);
    CHECK(f.service->stats().store.claims == 3);
    f.service->store().retire_space(
        f.service->wants_of_kinds(f.scheduler, 0).value().kinds[kWindow].generation);
    f.work();
    CHECK(f.service->stats().store.claims == 0);
    f.complete_all();
    f.check_rest();
  }

  TEST_CASE("a slow peer is probed with one claim, and then not read from") {
    KindsPeers f;
    f.give_eight(0, 1);
    f.give_eight(0, 2);
    const cluster::ComputeTime fast{.delay = {}, .per_block = microseconds(1)};
    REQUIRE(f.claim_from_peers(kOne, 1, 8, fast).claimed.units == 8);
    while (!f.fabric.batches.empty()) {
      f.clock.advance(milliseconds(10));
      f.complete();
    }
    CHECK(f.claim_from_peers(kTwo, 2, 8, fast).claimed.units == 0);
    CHECK(f.fetches->stats().declined == 12);
    // An engine that computes slower than the blocks arrive waits for them.
    const cluster::ComputeTime slow{.delay = {}, .per_block = milliseconds(1000)};
    const Claim claim = f.claim_from_peers(kTwo, 2, 8, slow);
    CHECK(claim.claimed.units == 8);
    CHECK(claim.arrival.last > milliseconds(100));
    f.complete_all();
    f.end(kOne);
    f.end(kTwo);
    f.check_rest();
  }
}

}  // namespace
}  // namespace pegaflow::testing
