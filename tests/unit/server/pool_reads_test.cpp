// Blocks that workers read out of the pools of other nodes, past that of their own node.
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include <doctest/doctest.h>

#include "server/fetches/fetches.h"
#include "server/fetches/recent_keys.h"
#include "tests/unit/server/fetches_fixture.h"

namespace pegaflow::testing {
namespace {

using Use = server::PoolReads::Use;

constexpr std::uint64_t kLarge = server::PoolReads::kLeastPiece;

/// A worker with a network of that backend.
Registration pool_worker(const std::string& backend = "ucx", std::size_t segments = 1) {
  Registration worker;
  worker.reads_pools = true;
  OfferedMemory& memory = worker.direct.emplace();
  memory.group = "group";
  memory.blocks = 64;
  memory.segments.resize(segments);
  memory.network.emplace().fabric.backend = backend;
  return worker;
}

struct PoolFixture : Fixture {
  explicit PoolFixture(Use use = Use::kForce, Registration worker = pool_worker())
      : Fixture(256, {.batch_bytes = kPage, .batches_per_owner = 2}, kLarge, {.direct_pool = use},
                std::move(worker)) {
    peers.lenders[0].described = {.backend = "ucx",
                                  .incarnation = {4, 4},
                                  .address = {},
                                  .regions = {{.region = RegionId{3}, .size_bytes = 1 << 20},
                                              {.region = RegionId{4}, .size_bytes = 4096}}};
    peers.lenders[0].page_of = [](const Bytes32&, const BlockKey& key) {
      return static_cast<std::uint32_t>(key.hash() % 100);
    };
  }

  /// The answer to a worker's open under `last_pin`.
  server::Fetches::Arrived opened(const Id128& token, std::size_t first, std::size_t count,
                                  server::Fetches::Wait wait = {}) {
    wait.patience = std::chrono::hours(1);
    auto got = fetches->open(engine, token, first, count, engine::PinId{++last_pin}, wait)
                   .wait(io.waitScope);
    if (!got) FAIL(to_string(got.error()));
    return std::move(*got);
  }
  Result<bool> confirm() {
    return fetches->confirm(engine, engine::PinId{last_pin}).wait(io.waitScope);
  }
  void release() { fetches->released(engine, engine::PinId{last_pin}); }
  PlayedLender& owner() { return peers.lenders[0]; }
};

std::vector<std::uint32_t> pages_of(std::span<const BlockKey> wanted) {
  std::vector<std::uint32_t> pages;
  for (const BlockKey& key : wanted) pages.push_back(static_cast<std::uint32_t>(key.hash() % 100));
  return pages;
}

TEST_SUITE("pools of other nodes") {
  TEST_CASE("a worker receives the places of the blocks, and no byte comes into this node's pool") {
    PoolFixture f;
    const auto wanted = keys(1, 6);
    REQUIRE(f.claim(kOne, wanted) == 6);
    CHECK(f.fetches->stats().pool_claims == 1);

    const auto first = f.opened(kOne, 0, 6);

    REQUIRE(first.in_pool);
    CHECK(first.in_pool->pages == pages_of(wanted));
    CHECK(first.in_pool->source != 0);
    REQUIRE(first.in_pool->fabric);
    CHECK(first.in_pool->fabric->regions.size() == 1);
    CHECK(first.in_pool->fabric->regions.front().region == RegionId{3});
    CHECK(first.opened.slots.empty());
    CHECK(first.opened.coming == 0);
    CHECK(f.fetches->stats().pool_reads == 1);
    CHECK(f.confirm().value());
    CHECK(f.owner().confirmed == std::vector<std::uint64_t>{1});
    f.release();
    f.unclaim(kOne);

    CHECK(f.fabric.batches.empty());
    CHECK(f.fetches->stats().pool_blocks == 6);
    CHECK(f.fetches->stats().pool_bytes == 6 * kLarge);
    CHECK(f.service->stats().load_bytes == 6 * kLarge);
    CHECK(f.fetches->stats().pool_claims == 0);
    CHECK(f.fetches->stats().pool_reads == 0);
    f.check_rest();
  }

  TEST_CASE("a worker that knows the pool gets no second description of it") {
    PoolFixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    const auto first = f.opened(kOne, 0, 2);
    CHECK(f.opened(kOne, 2, 2).in_pool->fabric);
    const auto again = f.opened(kOne, 4, 2, {.known = {first.in_pool->source}});
    CHECK(again.in_pool->source == first.in_pool->source);
    CHECK_FALSE(again.in_pool->fabric);
    const auto all = keys(1, 6);
    CHECK(again.in_pool->pages == pages_of(std::span(all).subspan(4)));
    for (; f.last_pin != 0; --f.last_pin) f.release();
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("bytes do not count if the owner had ended the lease, or the namespace was reset") {
    PoolFixture f;
    bool is_reset = false;
    SUBCASE("lease") { f.owner().holds = false; }
    SUBCASE("time") { f.owner().holds = true; }
    SUBCASE("reset") { is_reset = true; }
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    REQUIRE(f.opened(kOne, 0, 6).in_pool);
    if (is_reset) {
      REQUIRE(f.service->reset_cache(f.engine));
    } else if (f.owner().holds) {
      f.clock.advance(cluster::PeerSource::kLease);
    }
    CHECK_FALSE(f.confirm().value());
    CHECK(f.fetches->stats().pool_unconfirmed == 6);
    CHECK(f.fetches->stats().pool_blocks == 0);
    f.release();
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("the lease lasts until the claim has ended and the last read is released") {
    PoolFixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    REQUIRE(f.opened(kOne, 0, 6).in_pool);
    f.unclaim(kOne);
    CHECK(f.owner().released.empty());
    CHECK(f.confirm().value());
    f.release();
    CHECK(f.owner().released.size() == 1);
    CHECK(f.confirm().error().code == Errc::kInvalidArgument);
    f.check_rest();
  }

  TEST_CASE("the end of a connection ends its reads and its claims") {
    PoolFixture f;
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    REQUIRE(f.opened(kOne, 0, 6).in_pool);
    f.fetches->left({9, 9});
    CHECK(f.fetches->stats().pool_reads == 1);
    f.fetches->left(f.engine);
    CHECK(f.fetches->stats().pool_reads == 0);
    CHECK(f.fetches->stats().pool_claims == 0);
    CHECK(f.owner().released.size() == 1);
  }

  TEST_CASE("a claim begins with blocks of this node and ends with those of another one") {
    PoolFixture f(Use::kAuto);
    f.measure();
    const auto wanted = keys(99, 10);  // The first four are in the pool since then.
    const auto found = f.service->claim(f.engine, kOne, wanted).value();
    REQUIRE(found.blocks == 4);
    KJ_IF_MAYBE (extending, f.fetches->extend(f.engine, kOne, wanted, 4)) {
      CHECK(extending->wait(f.io.waitScope).blocks == 6);
    }
    const auto here = f.opened(kOne, 0, 10);
    CHECK(here.opened.slots.size() == 4);
    CHECK(here.opened.coming == 6);
    CHECK_FALSE(here.in_pool);
    const auto there = f.opened(kOne, 4, 6);
    REQUIRE(there.in_pool);
    CHECK(there.in_pool->pages == pages_of(std::span(wanted).subspan(4)));
    f.release();
    REQUIRE(f.service->release(f.engine, engine::PinId{f.last_pin - 1}));
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("blocks that a second request wants come into this node's pool") {
    PoolFixture f(Use::kAuto);
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    CHECK(f.fetches->stats().pool_claims == 1);
    f.unclaim(kOne);

    REQUIRE(f.claim(kTwo, keys(1, 6)) == 6);

    // The four of both come into the pool; the two behind them are new.
    CHECK(f.opened(kTwo, 4, 2).in_pool);
    f.release();
    for (int i = 0; i < 4; ++i) f.complete();
    CHECK(f.here(keys(1, 6)) == 4);
    CHECK(f.opened(kTwo, 0, 4).opened.slots.size() == 4);
    REQUIRE(f.service->release(f.engine, engine::PinId{f.last_pin}));
    f.unclaim(kTwo);
    f.check_rest();
  }

  TEST_CASE("a claim whose end has to come into the pool comes into it as a whole") {
    PoolFixture f(Use::kAuto);
    f.measure();
    const auto all = keys(1, 12);
    // The end was requested lately, with a beginning that was local then.
    REQUIRE(f.claim(kOne, std::span(all).subspan(4)) == 8);
    f.unclaim(kOne);
    REQUIRE(f.claim(kTwo, all) == 12);
    CHECK(f.fetches->stats().pool_claims == 0);
    for (int i = 0; i < 12; ++i) f.complete();
    CHECK(f.here(all) == 12);
    f.unclaim(kTwo);
    f.check_rest();
  }

  TEST_CASE("a second owner of a claim, of unknown rate, makes all of it come into the pool") {
    PoolFixture f(Use::kAuto);
    f.peers.lenders.resize(2);
    f.measure();
    f.owner().most_per_lease = 6;
    f.owner().has = [first = keys(1, 6)](const Bytes32&, const BlockKey& key) {
      return std::ranges::find(first, key) != first.end();
    };
    REQUIRE(f.claim(kOne, keys(1, 12)) == 12);
    CHECK(f.fetches->stats().pool_claims == 0);
    for (int i = 0; i < 12; ++i) f.complete();
    CHECK(f.here(keys(1, 12)) == 12);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("of blocks that are lent in parts only the last part is read past the pool") {
    PoolFixture f;
    f.owner().most_per_lease = 4;
    const auto wanted = keys(1, 10);
    REQUIRE(f.claim(kOne, wanted) == 10);
    CHECK(f.owner().leases == 3);
    for (int i = 0; i < 8; ++i) f.complete();
    CHECK(f.here(wanted) == 8);
    CHECK(f.opened(kOne, 8, 2).in_pool->pages == pages_of(std::span(wanted).subspan(8)));
    f.release();
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("blocks behind those of another node that are local belong to the claim") {
    PoolFixture f(Use::kAuto);
    f.measure();
    const auto all = keys(1, 12);
    REQUIRE(f.claim(kOne, all) == 12);
    f.unclaim(kOne);
    // The last six come into the pool because they are asked for again.
    REQUIRE(f.claim(kTwo, std::span(all).subspan(6)) == 6);
    for (int i = 0; i < 6; ++i) f.complete();
    f.unclaim(kTwo);
    f.owner().has = [first = keys(1, 6)](const Bytes32&, const BlockKey& key) {
      return std::ranges::find(first, key) != first.end();
    };
    CHECK(f.claim(kThree, all) == 12);
    while (!f.fabric.batches.empty()) f.complete();
    f.unclaim(kThree);
    f.check_rest();
  }

  TEST_CASE("a claim whose connection ends while it is made leaves no lease") {
    PoolFixture f;
    f.owner().has = [first = keys(1, 4)](const Bytes32&, const BlockKey& key) {
      return std::ranges::find(first, key) != first.end();
    };
    auto extending = f.extend(kOne, keys(1, 4));
    f.owner().before_lease = [&] {
      f.fetches->left(f.engine);
      f.service->disconnected(f.engine);
    };
    CHECK(extending.wait(f.io.waitScope).blocks == 0);
    CHECK(f.fetches->stats().pool_claims == 0);
    CHECK(f.owner().released.size() == f.owner().leases);
  }

  TEST_CASE("bytes are queued at their owner until they were expected, and while they are read") {
    PoolFixture f(Use::kAuto);
    f.measure();
    REQUIRE(f.claim(kOne, keys(1, 6)) == 6);
    const auto queued = [&] { return f.source->rate(f.owner())->queued_bytes(); };
    CHECK(queued() == 6 * kLarge);
    REQUIRE(f.opened(kOne, 0, 6).in_pool);
    CHECK(queued() == 6 * kLarge);
    CHECK(f.confirm().value());
    CHECK(queued() == 0);
    f.release();
    REQUIRE(f.opened(kOne, 0, 2).in_pool);
    CHECK(queued() == 2 * kLarge);
    f.release();
    CHECK(queued() == 0);

    // A claim that waits in its engine does not make the owner look busy for long.
    REQUIRE(f.claim(kTwo, keys(2, 6)) == 6);
    f.clock.advance(std::chrono::seconds(1));
    CHECK(f.claim(kThree, keys(3, 4), milliseconds(12)).blocks == 4);
    f.unclaim(kOne);
    f.unclaim(kTwo);
    f.unclaim(kThree);
    CHECK(queued() == 0);
    f.check_rest();
  }

  TEST_CASE("blocks of a lease that has ended come through the pool") {
    PoolFixture f;
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    f.clock.advance(cluster::PeerSource::kLease);
    auto opening = f.fetches->open(f.engine, kOne, 0, 4, engine::PinId{++f.last_pin},
                                   {.patience = std::chrono::hours(1)});
    f.io.waitScope.poll();
    for (int i = 0; i < 4; ++i) f.complete();
    CHECK(opening.wait(f.io.waitScope)->opened.slots.size() > 0);
    REQUIRE(f.service->release(f.engine, engine::PinId{f.last_pin}));
    f.unclaim(kOne);
    // The engine reads that pool all the same.
    REQUIRE(f.claim(kTwo, keys(2, 2)) == 2);
    CHECK(f.fetches->stats().pool_claims == 1);
    f.unclaim(kTwo);
    f.check_rest();
  }

  TEST_CASE(
      "blocks that another claim has brought meanwhile are opened, even without their owner") {
    PoolFixture f;
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    REQUIRE(f.claim(kTwo, keys(1, 4)) == 4);
    auto opening = f.fetches->open(f.engine, kTwo, 0, 4, engine::PinId{++f.last_pin},
                                   {.patience = std::chrono::hours(1), .through_pool = true});
    f.io.waitScope.poll();
    for (int i = 0; i < 4; ++i) f.complete();
    CHECK(opening.wait(f.io.waitScope)->opened.slots.size() > 0);
    REQUIRE(f.service->release(f.engine, engine::PinId{f.last_pin}));
    f.owner().has = [](const Bytes32&, const BlockKey&) { return false; };
    const auto again = f.opened(kOne, 0, 4, {.through_pool = true});
    CHECK(again.opened.slots.size() == 4);
    REQUIRE(f.service->release(f.engine, engine::PinId{f.last_pin}));
    f.unclaim(kOne);
    f.unclaim(kTwo);
    f.check_rest();
  }

  TEST_CASE("a release ends an open that waits for blocks to be fetched into the pool") {
    PoolFixture f;
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    auto opening = f.fetches->open(f.engine, kOne, 0, 4, engine::PinId{++f.last_pin},
                                   {.patience = std::chrono::hours(1), .through_pool = true});
    f.release();
    CHECK(opening.wait(f.io.waitScope).error().code == Errc::kCancelled);
    f.io.waitScope.poll();
    f.unclaim(kOne);
    for (int i = 0; i < 2; ++i) f.complete();
    f.check_rest();
  }

  TEST_CASE("one rank reads the pool while another gets its pages through that of this node") {
    Registration first = pool_worker();
    first.ranks = first.shards = 2;
    PoolFixture f(Use::kForce, first);
    const Id128 second{1, 2};
    REQUIRE(f.service->connected(second, {.process = second,
                                          .previous_connection = {},
                                          .quiesced = false,
                                          .build = "test",
                                          .watch = std::make_shared<int>(0)}));
    Registration other = first;
    other.instance = "engine";
    other.factors = {{"weights", "a"}};
    other.page_bytes = kLarge;
    other.rank = other.shard = 1;
    REQUIRE(f.service->register_rank(second, other));
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    const auto direct = f.opened(kOne, 0, 4);
    REQUIRE(direct.in_pool);

    const engine::PinId pin{77};
    auto opening = f.fetches->open(second, kOne, 0, 4, pin,
                                   {.patience = std::chrono::hours(1), .through_pool = true});
    f.io.waitScope.poll();
    for (int i = 0; i < 4; ++i) f.complete();
    const auto through = opening.wait(f.io.waitScope);

    REQUIRE(through);
    CHECK_FALSE(through->in_pool);
    CHECK(through->opened.slots.size() + through->opened.coming == 4);
    CHECK(f.confirm().value());
    f.release();
    CHECK(f.opened(kOne, 0, 4).in_pool->pages == direct.in_pool->pages);
    f.release();
    f.fetches->released(second, pin);
    REQUIRE(f.service->release(second, pin));
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("the token of such a claim is refused for another one until it has ended") {
    PoolFixture f;
    REQUIRE(f.fetches->check_unused(kOne));
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    CHECK(f.fetches->check_unused(kOne).error().code == Errc::kInvalidArgument);
    f.unclaim(kOne);
    CHECK(f.fetches->check_unused(kOne));
    f.check_rest();
  }

  TEST_CASE("small pieces, and cards that are slow with a GPU, are not used unless it is forced") {
    Registration worker;
    SUBCASE("pieces") { worker = pool_worker("ucx", 2); }
    SUBCASE("cards") {
      worker = pool_worker();
      worker.reads_pools_slowly = true;
    }
    for (const Use use : {Use::kAuto, Use::kForce}) {
      PoolFixture f(use, worker);
      if (use == Use::kAuto) f.measure();
      REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
      CHECK(f.fetches->stats().pool_claims == (use == Use::kForce ? 1 : 0));
      if (use == Use::kAuto) {
        for (int i = 0; i < 2; ++i) f.complete();
      }
      f.unclaim(kOne);
      f.check_rest();
    }
  }

  TEST_CASE("an owner whose rate is not known is read into the pool first") {
    PoolFixture f(Use::kAuto);
    REQUIRE(f.claim(kOne, keys(1, 2)) == 2);
    CHECK(f.fetches->stats().pool_claims == 0);
    for (int i = 0; i < 2; ++i) f.complete();
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE(
      "without a network of the owner's backend, or with --direct-pool off, all goes through "
      "the pool") {
    std::unique_ptr<PoolFixture> f;
    SUBCASE("another backend") {
      f = std::make_unique<PoolFixture>(Use::kForce, pool_worker("tcp"));
    }
    SUBCASE("no network") { f = std::make_unique<PoolFixture>(Use::kForce, Registration{}); }
    SUBCASE("off") { f = std::make_unique<PoolFixture>(Use::kOff); }
    SUBCASE("the owner's lane is not the workers'") {
      f = std::make_unique<PoolFixture>();
      f->owner().described.reset();
    }
    SUBCASE("blocks are pending at the owner") {
      f = std::make_unique<PoolFixture>();
      f->owner().in_pool = 1;
    }
    REQUIRE(f->claim(kOne, keys(1, 2)) == 2);
    CHECK(f->fetches->stats().pool_claims == 0);
    CHECK_FALSE(f->fabric.batches.empty());
    f->complete();
    f->unclaim(kOne);
  }

  TEST_CASE(
      "a worker that cannot read the pool gets the blocks through this node's, and the "
      "engine's next claims too") {
    PoolFixture f;
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    REQUIRE(f.opened(kOne, 0, 4).in_pool);
    f.release();

    auto opening = f.fetches->open(f.engine, kOne, 0, 4, engine::PinId{++f.last_pin},
                                   {.patience = std::chrono::hours(1), .through_pool = true});
    f.io.waitScope.poll();
    for (int i = 0; i < 4; ++i) f.complete();
    const auto through = opening.wait(f.io.waitScope);

    REQUIRE(through);
    CHECK_FALSE(through->in_pool);
    CHECK(through->opened.slots.size() + through->opened.coming == 4);
    CHECK(f.fetches->stats().pool_through_local == 4);
    CHECK(f.here(keys(1, 4)) == 4);
    REQUIRE(f.service->release(f.engine, engine::PinId{f.last_pin}));
    f.unclaim(kOne);

    REQUIRE(f.claim(kTwo, keys(2, 2)) == 2);
    CHECK(f.fetches->stats().pool_claims == 0);
    for (int i = 0; i < 2; ++i) f.complete();
    f.unclaim(kTwo);
    f.clock.advance(server::PoolReads::kPause);
    REQUIRE(f.claim(kThree, keys(3, 2)) == 2);
    CHECK(f.fetches->stats().pool_claims == 1);
    f.unclaim(kThree);
    f.check_rest();
  }

  TEST_CASE("blocks that cannot be fetched after all are named") {
    PoolFixture f;
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    f.owner().has = [](const Bytes32&, const BlockKey&) { return false; };
    const auto none = f.fetches
                          ->open(f.engine, kOne, 0, 4, engine::PinId{++f.last_pin},
                                 {.patience = std::chrono::hours(1), .through_pool = true})
                          .wait(f.io.waitScope);
    REQUIRE_FALSE(none);
    CHECK(none.error().code == Errc::kGone);
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("blocks that the claim lacks, and a pin in use, are refused") {
    PoolFixture f;
    REQUIRE(f.claim(kOne, keys(1, 4)) == 4);
    const auto code_of_open = [&](std::size_t first, std::size_t count, std::uint64_t pin) {
      const auto got = f.fetches->open(f.engine, kOne, first, count, engine::PinId{pin}, {})
                           .wait(f.io.waitScope);
      return got ? std::nullopt : std::optional(got.error().code);
    };
    CHECK(code_of_open(4, 1, 11) == Errc::kInvalidArgument);
    CHECK(code_of_open(2, 2, 12) == std::nullopt);
    CHECK(code_of_open(0, 2, 12) == Errc::kInvalidArgument);
    CHECK(f.fetches->stats().pool_reads == 1);
    f.fetches->released(f.engine, engine::PinId{12});
    f.unclaim(kOne);
    f.check_rest();
  }

  TEST_CASE("the oldest keys are forgotten beyond the limit") {
    server::RecentKeys recent;
    const engine::SpaceId space{1};
    recent.note(space, keys(1, 2));
    CHECK(recent.leading(space, keys(1, 3), true) == 2);
    CHECK(recent.leading(engine::SpaceId{2}, keys(1, 3), false) == 3);
    for (std::uint64_t chain = 2; chain < 2 + server::RecentKeys::kMost / 900; ++chain) {
      recent.note(space, keys(chain, 900));
    }
    CHECK(recent.leading(space, keys(1, 2), true) == 2);
    recent.note(space, keys(5000, 900));
    CHECK(recent.leading(space, keys(1, 2), true) == 0);
    CHECK(recent.leading(space, keys(5000, 900), true) == 900);
  }
}

}  // namespace
}  // namespace pegaflow::testing
