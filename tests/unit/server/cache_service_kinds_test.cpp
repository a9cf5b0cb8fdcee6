// Lookups, claims, saves and loads of blocks of several kinds.
#include <array>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/server/kinds_fixture.h"

namespace pegaflow::server {
namespace {

using testing::kFull;
using testing::KindsFixture;
using testing::kPage;
using testing::kState;
using testing::kWindow;
using testing::prompt;
using testing::text;

Errc code_of(const auto& result) {
  REQUIRE_FALSE(result.has_value());
  return result.error().code;
}

TEST_SUITE("CacheService, several kinds") {
  TEST_CASE("a prompt is restorable where every kind has what its rule needs") {
    KindsFixture f;
    CHECK(f.restorable(1, 8) == 0);
    f.save(kFull, 1, {0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(f.restorable(1, 8) == 0);
    f.save(kState, 1, {1, 3});  // After 64 and 128 tokens.
    CHECK(f.restorable(1, 8) == 0);
    f.save(kWindow, 1, {1, 2, 3});
    CHECK(f.restorable(1, 8) == 4);
    f.save(kWindow, 1, {6, 7});
    CHECK(f.restorable(1, 8) == 4);  // The window of 48 tokens needs block 5 too.
    f.save(kWindow, 1, {5});
    CHECK(f.restorable(1, 8) == 8);
    CHECK(f.restorable(1, 12) == 8);
    CHECK(f.restorable(1, 7) == 4);  // Aligned to 32 tokens: 6 units, which have no state.
    CHECK(f.restorable(2, 8) == 0);
  }

  TEST_CASE("the blocks of the engine's own prefix are not needed, its windows and states are") {
    KindsFixture f;
    f.save(kFull, 1, {4, 5, 6, 7});
    f.save(kWindow, 1, {5, 6, 7});
    f.save(kState, 1, {3});
    CHECK(f.restorable(1, 8) == 0);
    CHECK(f.restorable(1, 8, 4) == 8);
    CHECK(f.restorable(1, 8, 8) == 0);  // None beyond what it has.
    CHECK(f.restorable(1, 8, 10) == 0);
    const auto claimed = f.claim({1, 1}, 1, 8, 4);
    REQUIRE(claimed);
    CHECK(claimed->units == 8);
    CHECK(text(*claimed) == "0:4+4 1:5+3 2:3+1");
    // With a local hit that needs only windows and states.
    const auto all = f.claim({1, 2}, 1, 8, 6);
    CHECK(text(*all) == "0:6+2 1:5+3 2:3+1");
  }

  TEST_CASE("local units that are no multiple of the alignment are an error") {
    KindsFixture f;
    const auto refused = f.service->restorable(f.scheduler, prompt(1, 8), 3);
    CHECK(code_of(refused) == Errc::kInvalidArgument);
    CHECK(refused.error().detail ==
          "localUnits 3: 48 tokens are not a multiple of the alignment of 32");
    CHECK(code_of(f.claim({1, 1}, 1, 8, 1)) == Errc::kInvalidArgument);
    CHECK(code_of(f.service->boundaries(f.scheduler, prompt(1, 8), 5)) == Errc::kInvalidArgument);
  }

  TEST_CASE("a chunk needs the blocks from its begin on") {
    Registration chunked = testing::full_window_state();
    chunked.kinds[kWindow] = {
        .rule = wire::Kind::Rule::CHUNK, .tokens = 64, .block_tokens = 16, .page_bytes = kPage};
    chunked.kinds.pop_back();
    KindsFixture f(chunked);
    f.save(kFull, 1, {0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(f.restorable(1, 8) == 8);  // At a chunk's begin no block of it is needed.
    CHECK(text(f.claim({1, 1}, 1, 8).value()) == "0:0+8");
    CHECK(f.restorable(1, 6) == 4);
    f.save(kWindow, 1, {4, 5});
    CHECK(f.restorable(1, 6) == 6);
    CHECK(text(f.claim({1, 2}, 1, 6).value()) == "0:0+6 1:4+2");
  }

  TEST_CASE("a claim has the ranges that the rules name, and no other block") {
    KindsFixture f;
    f.save_eight(1);
    f.save(kWindow, 1, {0, 1, 2, 3, 4});
    f.save(kState, 1, {0, 1, 2});
    const auto claimed = f.claim({1, 1}, 1, 8);
    REQUIRE(claimed);
    CHECK(claimed->complete);
    CHECK(claimed->units == 8);
    CHECK(text(*claimed) == "0:0+8 1:5+3 2:3+1");
    CHECK(f.service->stats().store.held == 12);
    CHECK(f.service->stats().store.claims == 3);
  }

  TEST_CASE("a block that vanishes after the lookup makes the claim shorter, or none") {
    KindsFixture f;
    f.save_eight(1);
    f.save(kWindow, 1, {1, 2, 3});
    f.save(kState, 1, {1});
    REQUIRE(f.restorable(1, 8) == 8);
    const auto lose = [&](std::size_t kind, std::uint64_t name, std::size_t units,
                          std::uint32_t place) {
      REQUIRE(f.claim({name, 1}, 1, units));
      const auto opened = f.open({name, 1}, kind, 0, place + 1, name);
      REQUIRE(opened);
      const std::vector<std::uint32_t> places = {place};
      REQUIRE(f.service->corrupt(f.worker, engine::PinId{name}, places));
      REQUIRE(f.service->release(f.worker, engine::PinId{name}));
      REQUIRE(f.service->unclaim(f.scheduler, {name, 1}));
      f.work();
    };
    lose(kState, 7, 8, 0);
    CHECK(text(f.claim({1, 1}, 1, 8).value()) == "0:0+4 1:1+3 2:1+1");
    REQUIRE(f.service->unclaim(f.scheduler, {1, 1}));
    lose(kWindow, 8, 8, 0);
    const auto none = f.claim({1, 2}, 1, 8);
    REQUIRE(none);
    CHECK(none->complete);
    CHECK(none->units == 0);
    CHECK(none->ranges.empty());
    f.work();
    CHECK(f.service->stats().store.claims == 0);
    CHECK(f.service->stats().store.held == 0);
  }

  TEST_CASE("where a limit is short the claim is on a shorter prefix, whole, or there is none") {
    // A prefix of 128 tokens needs 13 pages, one of 64 needs 9, one of 32 needs 6.
    for (const auto& [share, wanted] : {std::pair{13.0, "0:0+8 1:5+3 2:3+1"},
                                        {12.0, "0:0+4 1:1+3 2:1+1"},
                                        {9.0, "0:0+4 1:1+3 2:1+1"},
                                        {8.0, "0:0+2 1:0+2 2:0+1"},
                                        {6.0, "0:0+2 1:0+2 2:0+1"},
                                        {5.0, ""}}) {
      for (const bool of_server : {false, true}) {
        CAPTURE(share);
        CAPTURE(of_server);
        const double part = (share + 0.5) / 256;
        KindsFixture f(testing::full_window_state(), {.pool_bytes = 256 * kPage,
                                                      .instance_share = of_server ? 1.0 : part,
                                                      .server_share = of_server ? part : 1.0});
        f.save_eight(1);
        f.save(kWindow, 1, {0, 1, 2, 3});
        f.save(kState, 1, {0, 1});
        const auto claimed = f.claim({1, 1}, 1, 8);
        REQUIRE(claimed);
        CHECK(text(*claimed) == std::string(wanted));
        CHECK((claimed->units == 0) == claimed->ranges.empty());
        f.work();
        CHECK(f.service->stats().store.claims == claimed->ranges.size());
      }
    }
  }

  TEST_CASE("blocks that another claim holds need no room of the server's share") {
    KindsFixture f(testing::full_window_state(),
                   {.pool_bytes = 256 * kPage, .instance_share = 1.0, .server_share = 13.5 / 256});
    f.save_eight(1);
    CHECK(f.claim({1, 1}, 1, 8)->units == 8);
    CHECK(f.claim({1, 2}, 1, 8)->units == 8);
  }

  TEST_CASE("a longer prompt than the server's share gets what another claim holds of it") {
    // The first 64 tokens are all that may be held.
    KindsFixture f(testing::full_window_state(),
                   {.pool_bytes = 256 * kPage, .instance_share = 1.0, .server_share = 9.5 / 256});
    f.save_eight(1);
    f.save(kWindow, 1, {1, 2, 3});
    f.save(kState, 1, {1});
    CHECK(f.claim({1, 1}, 1, 4)->units == 4);
    CHECK(text(f.claim({1, 2}, 1, 8).value()) == "0:0+4 1:1+3 2:1+1");
  }

  TEST_CASE("a limit counts pages with the bytes that they take in the pool") {
    // Each page takes two slots: a prefix of 128 tokens needs 24, one of 64 needs 16, one of 32
    // needs 10.
    Registration odd = testing::full_window_state();
    for (RegisteredKind& kind : odd.kinds) kind.page_bytes = kPage + 512;
    for (const auto& [share, wanted] : {std::pair{24.0, "0:0+8 1:5+3 2:3+1"},
                                        {23.0, "0:0+4 1:1+3 2:1+1"},
                                        {15.0, "0:0+2 1:0+2 2:0+1"},
                                        {9.0, ""}}) {
      CAPTURE(share);
      KindsFixture f(
          odd,
          {.pool_bytes = 256 * kPage, .instance_share = (share + 0.5) / 256, .server_share = 1.0});
      f.save_eight(1);
      f.save(kWindow, 1, {0, 1, 2, 3});
      f.save(kState, 1, {0, 1});
      CHECK(text(f.claim({1, 1}, 1, 8).value()) == std::string(wanted));
    }
  }

  TEST_CASE("a worker opens the range of each kind, counted from the claim's first block") {
    KindsFixture f;
    f.save_eight(1);
    REQUIRE(f.claim({1, 1}, 1, 8));
    const auto windows = f.open({1, 1}, kWindow, 0, 3, 1);
    REQUIRE(windows);
    CHECK(windows->slots.size() == 3);
    const auto last = f.open({1, 1}, kWindow, 2, 1, 2);
    REQUIRE(last);
    CHECK(last->slots.front() == windows->slots[2]);
    CHECK(f.open({1, 1}, kFull, 0, 8, 3)->slots.size() == 8);
    CHECK(f.open({1, 1}, kState, 0, 1, 4)->slots.size() == 1);

    CHECK(code_of(f.open({1, 1}, kState, 1, 1, 5)) == Errc::kInvalidArgument);
    CHECK(code_of(f.open({1, 1}, kWindow, 5, 3, 5)) == Errc::kInvalidArgument);
    const auto beyond = f.open({1, 1}, 3, 0, 1, 5);
    CHECK(code_of(beyond) == Errc::kInvalidArgument);
    CHECK(beyond.error().detail == "kind 3 of instance engine, whose blocks are of 3 kinds");
    // A pin is of one kind.
    CHECK(code_of(f.open({1, 1}, kFull, 0, 3, 1)) == Errc::kInvalidArgument);
  }

  TEST_CASE("a state and a full block with one key are two blocks") {
    KindsFixture f;
    // Unit 1 ends block 1 of full attention and state 0.
    f.save(kState, 1, {0});
    CHECK(f.restorable(1, 2) == 0);
    f.save(kFull, 1, {0, 1});
    CHECK(f.restorable(1, 2) == 0);
    f.save(kWindow, 1, {0, 1});
    CHECK(f.restorable(1, 2) == 2);
    CHECK(f.service->stats().store.sealed == 5);
    REQUIRE(f.claim({1, 1}, 1, 2));
    const auto full = f.open({1, 1}, kFull, 1, 1, 1);
    const auto window = f.open({1, 1}, kWindow, 1, 1, 2);
    const auto state = f.open({1, 1}, kState, 0, 1, 3);
    REQUIRE(full);
    REQUIRE(window);
    REQUIRE(state);
    CHECK(full->slots != window->slots);
    CHECK(full->slots != state->slots);
    CHECK(window->slots != state->slots);
    CHECK(f.service->stats().load_bytes == (1 + 1 + 2) * kPage);
  }

  TEST_CASE("the end of a claim ends it for all kinds") {
    KindsFixture f;
    f.save_eight(1);
    REQUIRE(f.claim({1, 1}, 1, 8));
    REQUIRE(f.service->unclaim(f.scheduler, {1, 1}));
    f.work();
    CHECK(f.service->stats().store.held == 0);
    // Without a part of kind 0: the engine has all of the prefix but the last units.
    f.save(kFull, 1, {8, 9});
    f.save(kWindow, 1, {8, 9});
    f.save(kState, 1, {4});
    REQUIRE(f.claim({1, 2}, 1, 10, 8)->units == 10);
    REQUIRE(f.service->unclaim(f.scheduler, {1, 2}));
    f.work();
    CHECK(f.service->stats().store.held == 0);
    CHECK(f.service->stats().store.claims == 0);

    REQUIRE(f.claim({1, 3}, 1, 8));
    f.service->disconnected(f.scheduler);
    f.work();
    CHECK(f.service->stats().store.claims == 0);
    CHECK(f.service->stats().store.held == 0);
  }

  TEST_CASE("a claim that makes room for saves ends for all kinds") {
    KindsFixture f(testing::full_window_state(),
                   {.pool_bytes = 32 * kPage, .instance_share = 1.0, .server_share = 1.0});
    f.save_eight(1);
    REQUIRE(f.claim({1, 1}, 1, 8));
    std::vector<std::size_t> many;
    for (std::size_t block = 0; block < 30; ++block) many.push_back(block);
    f.save(kFull, 2, many);
    f.work();
    CHECK(f.service->stats().store.claims == 0);
    for (const std::size_t kind : {kFull, kWindow, kState}) {
      CHECK(code_of(f.open({1, 1}, kind, 0, 1, 1)) == Errc::kGone);
    }
  }

  TEST_CASE("a second claim under one token is an error, and the first one stays") {
    KindsFixture f;
    f.save_eight(1);
    REQUIRE(f.claim({1, 1}, 1, 8));
    CHECK(code_of(f.claim({1, 1}, 1, 8)) == Errc::kInvalidArgument);
    CHECK(code_of(f.claim({}, 1, 8)) == Errc::kInvalidArgument);
    CHECK(f.open({1, 1}, kWindow, 0, 3, 1));
  }

  TEST_CASE("a job is of one kind") {
    KindsFixture f;
    const JobId job{.scheduler = Id128::random(), .number = 1};
    REQUIRE(f.reserve(job, prompt(1, 2), kWindow));
    CHECK(code_of(f.reserve(job, prompt(1, 2), kFull)) == Errc::kInvalidArgument);
    CHECK(code_of(f.reserve(job, prompt(1, 2), 3)) == Errc::kInvalidArgument);
    REQUIRE(f.service->publish(f.worker, job) == 0);
    CHECK(f.service->stats().store.sealed == 2);
    const engine::KindRule rule = engine::KindRule::kTrailing;
    CHECK(f.service->stats().kinds[static_cast<std::size_t>(rule)].saved_blocks == 2);
  }

  TEST_CASE("saves and loads are counted by kind, as parts of the sums") {
    KindsFixture f;
    f.save_eight(1);
    REQUIRE(f.claim({1, 1}, 1, 8));
    REQUIRE(f.open({1, 1}, kFull, 0, 8, 1));
    REQUIRE(f.open({1, 1}, kState, 0, 1, 2));
    const CacheStats stats = f.service->stats();
    const auto of = [&](engine::KindRule rule) {
      return stats.kinds[static_cast<std::size_t>(rule)];
    };
    CHECK(of(engine::KindRule::kPrefix).saved_blocks == 8);
    CHECK(of(engine::KindRule::kTrailing).saved_blocks == 3);
    CHECK(of(engine::KindRule::kChunk).saved_blocks == 0);
    CHECK(of(engine::KindRule::kState).saved_bytes == 2 * kPage);
    CHECK(of(engine::KindRule::kState).loaded_bytes == 2 * kPage);
    CHECK(of(engine::KindRule::kTrailing).loaded_blocks == 0);
    KindStats sum;
    for (const KindStats& each : stats.kinds) {
      sum.saved_blocks += each.saved_blocks;
      sum.saved_bytes += each.saved_bytes;
      sum.loaded_blocks += each.loaded_blocks;
      sum.loaded_bytes += each.loaded_bytes;
    }
    CHECK(sum.saved_blocks == stats.store.insertions);
    CHECK(sum.saved_bytes == stats.save_bytes);
    CHECK(sum.loaded_blocks == stats.load_blocks_own + stats.load_blocks_other);
    CHECK(sum.loaded_bytes == stats.load_bytes);
  }

  TEST_CASE("a lookup counts the blocks of kind 0 beyond the engine's own") {
    KindsFixture f;
    f.save_eight(1);
    CHECK(f.restorable(1, 10, 2) == 8);
    CacheStats stats = f.service->stats();
    CHECK(stats.store.lookups == 1);
    CHECK(stats.store.lookup_hits == 6);
    CHECK(stats.store.lookup_misses == 2);
    CHECK(stats.demand.front().requested == 8);
    CHECK(stats.demand.front().found == 6);
    CHECK(f.restorable(1, 6) == 0);  // Its window is missing: all 6 are behind a hole.
    stats = f.service->stats();
    CHECK(stats.store.lookup_hits == 6);
    CHECK(stats.store.misses[static_cast<std::size_t>(engine::Miss::kBehindHole)] == 6);
  }

  TEST_CASE("a lookup that searches other tiers is counted once, with what these have") {
    KindsFixture f;
    f.save_eight(1);
    const auto later = CacheService::Counted::kLater;
    const auto found = f.service->restorable(f.scheduler, prompt(1, 12), 2, later);
    REQUIRE(found);
    REQUIRE(found->units == 8);
    CHECK(f.service->stats().store.lookups == 0);

    f.service->note_restorable(f.scheduler, prompt(1, 12), 2, found->units, 10);

    const CacheStats stats = f.service->stats();
    CHECK(stats.store.lookups == 1);
    CHECK(stats.store.lookup_hits == 6);
    CHECK(stats.store.lookup_misses == 4);
    CHECK(stats.store.misses[static_cast<std::size_t>(engine::Miss::kOtherTier)] == 2);
    CHECK(stats.store.misses[static_cast<std::size_t>(engine::Miss::kNew)] == 2);
    CHECK(stats.demand.front().requested == 10);
  }

  TEST_CASE("boundaries are all lengths at which a prompt is restorable") {
    KindsFixture f;
    f.save_eight(1);
    f.save(kWindow, 1, {1, 2, 3});
    f.save(kState, 1, {1});
    const auto found = f.service->boundaries(f.scheduler, prompt(1, 20), 0);
    REQUIRE(found);
    CHECK(found->complete);
    // 64 and 128 tokens, in multiples of 32.
    CHECK(found->restorable == std::vector<std::byte>{std::byte{0b1010}});
    CHECK(f.service->boundaries(f.scheduler, prompt(1, 20), 4)->restorable ==
          std::vector<std::byte>{std::byte{0b1000}});
    CHECK(f.service->boundaries(f.scheduler, prompt(2, 20), 0)->restorable.empty());
    CHECK(f.service->stats().store.held == 0);
  }

  TEST_CASE("the journal has the blocks of all kinds in one order") {
    KindsFixture f;
    constexpr std::uint64_t kEnd = engine::BlockStore::kJournalEnd;
    const auto start = f.service->journal(f.scheduler, 0, kEnd).value();
    f.save(kFull, 1, {0});
    f.save(kState, 1, {0});
    f.save(kWindow, 1, {0});
    const auto part = f.service->journal(f.scheduler, start.space, start.part.next).value();
    CHECK_FALSE(part.part.has_lost);
    REQUIRE(part.part.entries.size() == 3);
    CHECK(part.part.entries[0].place == kFull);
    CHECK(part.part.entries[1].place == kState);
    CHECK(part.part.entries[1].key == prompt(1, 2)[1]);
    CHECK(part.part.entries[2].place == kWindow);
    REQUIRE(f.service->reset_cache(f.scheduler));
    f.save(kWindow, 1, {1});
    const auto reset = f.service->journal(f.scheduler, part.space, part.part.next).value();
    CHECK(reset.part.has_lost);
    CHECK(reset.space != part.space);
    REQUIRE(reset.part.entries.size() == 1);
    CHECK(reset.part.entries[0].place == kWindow);
  }

  TEST_CASE("before all ranks are connected nothing is found, and one kind has no boundaries") {
    Registration first = testing::full_window_state();
    first.ranks = 2;
    first.shards = 2;
    KindsFixture f(first);
    CHECK_FALSE(f.service->restorable(f.scheduler, prompt(1, 8), 0)->complete);
    CHECK_FALSE(f.claim({1, 1}, 1, 8)->complete);
    CHECK_FALSE(f.service->boundaries(f.scheduler, prompt(1, 8), 0)->complete);
    CHECK(f.service->stats().lookup_blocks_not_served == 8);

    const Id128 plain = f.connect();
    REQUIRE(f.service->register_rank(
        plain, {.instance = "plain", .factors = {{"weights", "b"}}, .page_bytes = kPage}));
    CHECK_FALSE(f.service->has_kinds(plain).value());
    CHECK(f.service->has_kinds(f.scheduler).value());
    CHECK(code_of(f.service->boundaries(plain, prompt(1, 8), 0)) == Errc::kInvalidArgument);
    CHECK(code_of(f.service->restorable(plain, prompt(1, 8), 0)) == Errc::kInvalidArgument);
    CHECK(f.service->claim_of_kind(plain, {1, 1}, 0).value() == Id128{1, 1});
    CHECK(code_of(f.service->claim_of_kind(plain, {1, 1}, 1)) == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::server
