// A model with several kinds of blocks, against a real server: every restored byte is compared.
#include <algorithm>
#include <csignal>
#include <random>
#include <string>
#include <thread>

#include <doctest/doctest.h>

#include "tests/support/engine_memory.h"
#include "tests/support/kinds_engine.h"
#include "tests/support/mapped_pool.h"
#include "tests/support/seed.h"
#include "tests/support/server_process.h"
#include "tests/support/slow_device.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

using Ranges = std::vector<KindRange>;

constexpr std::uint64_t kPrompt = 7;
constexpr std::size_t kUnits = 16;  ///< The prompt's units: 256 tokens.

/// Full attention, windows of 41 tokens in two groups of other sizes, and states.
std::vector<OverlaidMemory::Group> hybrid_groups() {
  return {{.layers = 3, .layer_bytes = 4096},
          {.layers = 2, .layer_bytes = 3000},
          {.layers = 2, .layer_bytes = 1048},
          {.layers = 1, .layer_bytes = 10'000}};
}
std::vector<KindOfGroups> hybrid_kinds() {
  return {{.rule = BlockRule::kPrefix, .tokens = 0, .block_tokens = 32, .groups = {0}},
          {.rule = BlockRule::kTrailing, .tokens = 40, .block_tokens = 16, .groups = {1, 2}},
          {.rule = BlockRule::kState, .tokens = 0, .block_tokens = 64, .groups = {3}}};
}
/// The blocks that 256 tokens need, and the windows and states that 128 need.
const Ranges kNeeded{{0, 0, 8}, {1, 13, 3}, {2, 3, 1}};
const Ranges kNeededHalf{{1, 5, 3}, {2, 1, 1}};

template <typename AnyDevice>
struct Fixture {
  explicit Fixture(std::unique_ptr<AnyDevice> its_device, KindsEngine::Options options = {})
      : memory(hybrid_groups(), 2000), device(std::move(its_device)) {
    options.socket = server.socket();
    options.kinds = hybrid_kinds();
    for (LinkOptions* const link : {&options.session, &options.mover.link}) {
      link->reconnect_interval = std::chrono::milliseconds(20);
    }
    engine = std::make_unique<KindsEngine>(std::move(options), memory, *device);
    engine->wait_ready();
  }

  /// Each range is a job.
  void save(const Ranges& ranges, std::uint64_t prompt = kPrompt) {
    for (const KindRange& range : ranges) {
      const Mover::Finished saved = engine->save(prompt, range);
      CHECK_FALSE(saved.error);
      CHECK(saved.blocks == range.count);
      CHECK(saved.bytes == range.count * engine->mover().page_bytes()[range.kind]);
    }
  }

  ServerProcess server;
  OverlaidMemory memory;
  std::unique_ptr<AnyDevice> device;
  std::unique_ptr<KindsEngine> engine;
};

struct OnHost : Fixture<HostDevice> {
  explicit OnHost(KindsEngine::Options options = {})
      : Fixture(HostDevice::create({.threads = 3}).value(), std::move(options)) {}
};

/// Its device stops where the test says.
struct Slow : Fixture<SlowDevice> {
  explicit Slow(KindsEngine::Options options = {})
      : Fixture(std::make_unique<SlowDevice>(), std::move(options)) {}
  ~Slow() { device->allow_all(); }

  /// Saves what 256 tokens need, and starts to load it with every page held back.
  CacheSession::Answer hold_load() {
    save(kNeeded);
    CacheSession::Answer claimed = engine->claim(kPrompt, kUnits).value();
    REQUIRE(claimed.ranges == kNeeded);
    const std::size_t before = device->batches();
    device->hold();
    REQUIRE(engine->start_load(claimed, claimed.ranges));
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (device->batches() < before + 4) {  // A batch for each of the four members.
      REQUIRE(std::chrono::steady_clock::now() < end);
    }
    REQUIRE(device->wait_held(kHang));
    return claimed;
  }
};

Errc code_of(const Mover::Finished& job) {
  REQUIRE(job.error);
  return job.error->code;
}

TEST_SUITE("several kinds of blocks") {
  TEST_CASE(
      "a claim has the blocks that the longest prefix needs, and all of their bytes come back") {
    OnHost f;
    f.save(kNeeded);
    f.save(kNeededHalf);

    CHECK(f.engine->boundaries(kPrompt, kUnits).value().multiples ==
          std::vector<std::uint32_t>{2, 4});
    const auto found = f.engine->lookup(kPrompt, kUnits).value();
    CHECK(found.complete);
    CHECK(found.blocks == kUnits);
    const auto claimed = f.engine->claim(kPrompt, kUnits).value();
    CHECK(claimed.blocks == kUnits);
    REQUIRE(claimed.ranges == kNeeded);
    const Mover::Finished loaded = f.engine->load(kPrompt, claimed, claimed.ranges);

    CHECK_FALSE(loaded.error);
    CHECK(loaded.blocks == 8 + 3 + 1);
    CHECK(loaded.bytes == 8 * 3 * 4096 + 3 * 2 * (3000 + 1048) + 10'000);
    CHECK(loaded.failed_blocks.empty());
    CHECK(f.memory.wrong_bytes() == 0);
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
    f.engine->session().unclaim(claimed.token);
    CHECK(f.server.metric_becomes("pegaflow_claims", 0));
  }

  TEST_CASE("windows and states are claimed whole behind the engine's own blocks") {
    OnHost f;
    f.save(kNeeded);

    const auto claimed = f.engine->claim(kPrompt, kUnits, kUnits / 2).value();

    CHECK(claimed.blocks == kUnits);
    REQUIRE(claimed.ranges == Ranges{{0, 4, 4}, {1, 13, 3}, {2, 3, 1}});
    CHECK_FALSE(f.engine->load(kPrompt, claimed, claimed.ranges).error);
    CHECK(f.memory.wrong_bytes() == 0);
    CHECK(f.engine->claim(kPrompt, kUnits, kUnits).value().blocks == 0);
    CHECK(f.engine->lookup(kPrompt, kUnits, 3).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a part of what was claimed can be loaded, and each part again") {
    OnHost f;
    f.save(kNeeded);
    const auto claimed = f.engine->claim(kPrompt, kUnits).value();

    const Mover::Finished part = f.engine->load(kPrompt, claimed, {{1, 14, 2}, {0, 3, 4}});
    CHECK_FALSE(part.error);
    CHECK(part.blocks == 6);
    CHECK_FALSE(f.engine->load(kPrompt, claimed, {{1, 13, 1}}).error);
    CHECK_FALSE(f.engine->load(kPrompt, claimed, {{2, 3, 1}}).error);

    CHECK(f.memory.wrong_bytes() == 0);
    CHECK(f.engine->start_load(claimed, {{1, 12, 2}}).error().detail ==
          "2 blocks of kind 1 from 12 on are not claimed (3 from 13 on are)");
  }

  TEST_CASE("nothing is claimed unless every kind has what the prefix needs") {
    OnHost f;
    f.save({{0, 0, 8}, {1, 13, 3}});  // No state.

    const auto claimed = f.engine->claim(kPrompt, kUnits).value();

    CHECK(claimed.blocks == 0);
    CHECK(claimed.complete);
    CHECK(claimed.token.is_none());
    CHECK(claimed.ranges.empty());
    CHECK(f.engine->boundaries(kPrompt, kUnits).value().multiples.empty());
  }

  TEST_CASE("a page has the members' pages one behind the other, in their order") {
    OnHost f;
    f.save(kNeeded);
    std::vector<std::byte> page(2 * (3000 + 1048));
    fill_page(page.data(), 6000, KindsEngine::seed_of(kPrompt, 1, 0, 14));
    fill_page(page.data() + 6000, 2096, KindsEngine::seed_of(kPrompt, 1, 1, 14));

    const MappedPool pool(f.server);

    CHECK(pool.find(page) != nullptr);
  }

  TEST_CASE("two kinds with the same keys have bytes and sizes of their own") {
    ServerProcess server;
    OverlaidMemory memory({{.layers = 2, .layer_bytes = 5000}, {.layers = 1, .layer_bytes = 900}},
                          200);
    const auto device = HostDevice::create({.threads = 2}).value();
    KindsEngine::Options options;
    options.socket = server.socket();
    options.alignment_tokens = 16;
    options.kinds = {{.rule = BlockRule::kPrefix, .groups = {0}},
                     {.rule = BlockRule::kTrailing, .tokens = 31, .groups = {1}}};
    KindsEngine engine(options, memory, *device);
    engine.wait_ready();
    CHECK(engine.save(kPrompt, {0, 0, 8}).blocks == 8);
    CHECK(engine.lookup(kPrompt, 8).value().blocks == 0);

    CHECK(engine.save(kPrompt, {1, 0, 8}).blocks == 8);

    const auto claimed = engine.claim(kPrompt, 8).value();
    REQUIRE(claimed.ranges == Ranges{{0, 0, 8}, {1, 6, 2}});
    CHECK_FALSE(engine.load(kPrompt, claimed, claimed.ranges).error);
    CHECK(memory.wrong_bytes() == 0);
    CHECK(engine.save(kPrompt, {1, 4, 4}).skipped == 4);
  }

  TEST_CASE("a rank without a layer of a kind takes part in the others") {
    ServerProcess server;
    OverlaidMemory memories[2] = {OverlaidMemory(hybrid_groups(), 500),
                                  OverlaidMemory(hybrid_groups(), 500)};
    std::unique_ptr<HostDevice> devices[2];
    std::unique_ptr<KindsEngine> ranks[2];
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      KindsEngine::Options options;
      options.socket = server.socket();
      options.kinds = hybrid_kinds();
      if (rank == 1) options.kinds[1].groups = {};
      options.mover.rank = rank;
      options.mover.ranks = 2;
      devices[rank] = HostDevice::create({.threads = 1}).value();
      ranks[rank] = std::make_unique<KindsEngine>(options, memories[rank], *devices[rank]);
    }
    for (auto& rank : ranks) rank->wait_ready();
    CHECK(ranks[1]->mover().page_bytes() == std::vector<std::uint64_t>{12'288, 0, 10'000});
    ranks[1]->scheduler = ranks[0]->scheduler;
    for (const KindRange& range : kNeeded) {
      for (auto& rank : ranks) REQUIRE(rank->start_save(kPrompt, range));
      CHECK(ranks[0]->next_finished().blocks == range.count);
      const Mover::Finished other = ranks[1]->next_finished();
      CHECK_FALSE(other.error);
      CHECK(other.blocks == (range.kind == 1 ? 0 : range.count));
      CHECK(other.skipped == (range.kind == 1 ? range.count : 0));
    }

    const auto claimed = ranks[0]->claim(kPrompt, kUnits).value();

    REQUIRE(claimed.ranges == kNeeded);
    for (std::size_t rank = 0; rank < 2; ++rank) {
      const Mover::Finished loaded = ranks[rank]->load(kPrompt, claimed, claimed.ranges);
      CHECK_FALSE(loaded.error);
      CHECK(loaded.blocks == 12);
      CHECK(memories[rank].wrong_bytes() == 0);
    }
    // All ranges may be of kinds that this rank has no layer of.
    CHECK(ranks[1]->load(kPrompt, claimed, {{1, 13, 3}}).blocks == 3);
  }

  TEST_CASE("random kinds, prompts and parts: every byte is right") {
    std::mt19937_64 random(seed());
    for (int round = 0; round < 12; ++round) {
      ServerProcess server;
      std::vector<OverlaidMemory::Group> groups;
      KindsEngine::Options options;
      options.socket = server.socket();
      options.alignment_tokens = 64;
      const std::size_t kinds = 1 + random() % 4;
      for (std::size_t kind = 0; kind < kinds; ++kind) {
        KindOfGroups own{
            .rule = BlockRule::kPrefix, .block_tokens = 16U << random() % 3, .groups = {}};
        if (kind > 0) own.rule = random() % 2 == 0 ? BlockRule::kTrailing : BlockRule::kState;
        if (own.rule == BlockRule::kTrailing) {
          own.tokens = 1 + static_cast<std::uint32_t>(random() % 150);
        }
        for (std::size_t member = 1 + random() % 3; member > 0; --member) {
          own.groups.push_back(groups.size());
          groups.push_back({.layers = 1 + random() % 3, .layer_bytes = 8 + random() % 6000});
        }
        options.kinds.push_back(std::move(own));
      }
      OverlaidMemory memory(groups, 6000);
      const auto device = HostDevice::create({.threads = 3}).value();
      KindsEngine engine(options, memory, *device);
      engine.wait_ready();
      std::size_t restored = 0;
      for (std::uint64_t prompt = 1; prompt <= 6; ++prompt) {
        const std::size_t tokens = 64 * (1 + random() % 6);
        for (std::size_t kind = 0; kind < kinds; ++kind) {
          const std::size_t blocks = tokens / options.kinds[kind].block_tokens;
          const std::size_t first = kind == 0 ? 0 : random() % std::min<std::size_t>(2, blocks);
          engine.save(prompt, {kind, first, blocks - first});
        }
        const auto claimed = engine.claim(prompt, tokens / 16).value();
        if (claimed.ranges.empty()) continue;
        ++restored;
        Ranges parts;
        for (KindRange range : claimed.ranges) {
          const std::size_t skipped = random() % range.count;
          range.first += skipped;
          range.count = 1 + random() % (range.count - skipped);
          parts.push_back(range);
        }
        std::shuffle(parts.begin(), parts.end(), random);
        CHECK_FALSE(engine.load(prompt, claimed, claimed.ranges).error);
        CHECK_FALSE(engine.load(prompt, claimed, parts).error);
        engine.session().unclaim(claimed.token);
      }
      CHECK(restored > 0);
      CHECK(memory.wrong_bytes() == 0);
    }
  }
}

TEST_SUITE("several kinds of blocks: failures") {
  TEST_CASE("a page that fails ends the load of all kinds, with their failed blocks") {
    Slow f;
    f.hold_load();
    f.device->fail_page(9);  // In the second batch.

    f.device->allow_all();

    const Mover::Finished failed = f.engine->next_finished();
    CHECK(code_of(failed) == Errc::kIo);
    CHECK(failed.blocks < 12);
    CHECK(failed.blocks >= 8);  // All of the first kind, whose batch ended before.
    const std::vector<std::uint32_t> all = f.engine->last_blocks();
    const auto is_named = [&](std::size_t place) {
      const auto& named = failed.failed_blocks;
      return std::find(named.begin(), named.end(), all[place]) != named.end();
    };
    CHECK_FALSE(is_named(7));
    // The last block of the windows, with the member that failed and the one that did not.
    CHECK(is_named(8 + 4));
    CHECK(is_named(8 + 5));
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
    f.engine->accept_last_load();
    CHECK(f.memory.wrong_bytes() == 0);
    // The next load is not affected.
    const auto claimed = f.engine->claim(kPrompt, kUnits).value();
    CHECK_FALSE(f.engine->load(kPrompt, claimed, claimed.ranges).error);
    CHECK(f.memory.wrong_bytes() == 0);
  }

  TEST_CASE("after the first page that fails, no page of another kind is begun") {
    Slow f;
    f.hold_load();
    f.device->fail_page(0);  // The second of the first kind.

    f.device->allow_pages(1);

    REQUIRE(f.device->wait_cancels(3, kHang));  // The batches of the other members.
    f.device->allow_all();
    const Mover::Finished failed = f.engine->next_finished();
    CHECK(code_of(failed) == Errc::kIo);
    CHECK(failed.blocks == 1);
    CHECK(failed.failed_blocks.size() == 14);
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
    f.engine->accept_last_load();
    CHECK(f.memory.wrong_bytes() == 0);
  }

  TEST_CASE("a batch that the device rejects ends the load, after the copies in flight") {
    Slow f;
    f.save(kNeeded);
    const auto claimed = f.engine->claim(kPrompt, kUnits).value();
    f.device->fail_next_submit({Errc::kBusy, "as injected"});

    CHECK(code_of(f.engine->load(kPrompt, claimed, claimed.ranges)) == Errc::kBusy);

    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
    f.engine->accept_last_load();
    CHECK_FALSE(f.engine->load(kPrompt, claimed, claimed.ranges).error);
    CHECK(f.memory.wrong_bytes() == 0);
  }

  TEST_CASE("a save of which one member fails seals nothing") {
    Slow f;
    f.device->fail_page(4);  // The second page of the second member.

    const Mover::Finished failed = f.engine->save(kPrompt, {1, 13, 3});

    CHECK(code_of(failed) == Errc::kIo);
    CHECK(failed.blocks == 0);
    CHECK(f.server.metric_becomes("pegaflow_reservations", 0));
    f.save(kNeeded);
    const auto claimed = f.engine->claim(kPrompt, kUnits).value();
    CHECK_FALSE(f.engine->load(kPrompt, claimed, claimed.ranges).error);
    CHECK(f.memory.wrong_bytes() == 0);
  }

  TEST_CASE("a load is completed early only when the device is that far with every kind") {
    Slow f;
    f.hold_load();
    const auto follow = [&] { return f.engine->mover().follow({}, std::chrono::hours(1)); };
    f.device->allow_early_completion();
    CHECK(follow().empty());  // The other batches are not that far.
    f.device->allow_early_completion_of_queued();

    const std::vector<Mover::Followed> followed = follow();

    REQUIRE(followed.size() == 1);
    CHECK(followed[0].blocks == 12);
    CHECK(followed[0].bytes == 8 * 3 * 4096 + 3 * 2 * (3000 + 1048) + 10'000);
    CHECK(follow().empty());  // Reported once.

    // It stays valid although the server is gone.
    f.server.kill();
    REQUIRE(f.device->wait_detaching(kHang));
    f.device->allow_all();
    const Mover::Finished ended = f.engine->next_finished();
    CHECK_FALSE(ended.error);
    CHECK(ended.blocks == 12);
    f.engine->expect_last_load(kPrompt);
    CHECK(f.memory.wrong_bytes() == 0);
  }

  TEST_CASE("killed and reconnected in a load: it fails with the blocks of all kinds") {
    Slow f;
    f.hold_load();

    f.server.kill();
    REQUIRE(f.device->wait_detaching(kHang));
    f.server.start();
    CHECK(f.engine->mover().take_finished().empty());
    f.device->allow_all();

    const Mover::Finished failed = f.engine->next_finished();
    CHECK(code_of(failed) == Errc::kPeerLost);
    CHECK(failed.blocks == 0);
    CHECK(failed.failed_blocks == f.engine->last_blocks());
    f.engine->accept_last_load();
    f.engine->wait_ready();
    CHECK(f.engine->lookup(kPrompt, kUnits).value().blocks == 0);
    f.save(kNeeded);
    const auto claimed = f.engine->claim(kPrompt, kUnits).value();
    CHECK_FALSE(f.engine->load(kPrompt, claimed, claimed.ranges).error);
    CHECK(f.memory.wrong_bytes() == 0);
  }

  TEST_CASE("a cancelled load and one past its deadline end with all kinds") {
    for (const bool by_deadline : {false, true}) {
      KindsEngine::Options options;
      // Longer than a busy machine takes until the device has all batches.
      if (by_deadline) options.mover.load_patience = std::chrono::milliseconds(500);
      Slow f(options);
      f.hold_load();
      if (!by_deadline) f.engine->mover().cancel_load(f.engine->last_job);
      // The batch that is being copied has a page in flight; the others end without a copy.
      REQUIRE(f.device->wait_cancels(4, kHang));

      f.device->allow_all();

      const Mover::Finished ended = f.engine->next_finished();
      CHECK(code_of(ended) == (by_deadline ? Errc::kTimeout : Errc::kCancelled));
      CHECK(ended.failed_blocks.size() >= 14);  // Of 15.
      CHECK(f.server.metric_becomes("pegaflow_pins", 0));
      f.engine->accept_last_load();
      CHECK(f.memory.wrong_bytes() == 0);
    }
  }

  TEST_CASE("closed in a load: it is reported after its copies, and the pins are released") {
    Slow f;
    f.hold_load();
    std::thread closing([&] { f.engine->mover().close(); });
    REQUIRE(f.device->wait_detaching(kHang));
    f.device->allow_all();
    closing.join();
    CHECK(code_of(f.engine->next_finished()) == Errc::kCancelled);
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
  }

  TEST_CASE("with checksums, a bit that changed in the pool in any member's part is found") {
    KindsEngine::Options options;
    options.mover.verify = Mover::Verify::kAll;
    OnHost f(options);
    f.save(kNeeded);
    const auto claimed = f.engine->claim(kPrompt, kUnits).value();
    const Mover::Finished whole = f.engine->load(kPrompt, claimed, claimed.ranges);
    CHECK_FALSE(whole.error);
    CHECK(whole.verified == 12);
    CHECK(f.memory.wrong_bytes() == 0);
    std::vector<std::byte> part(2096);
    fill_page(part.data(), part.size(), KindsEngine::seed_of(kPrompt, 1, 1, 14));
    const MappedPool pool(f.server);
    std::byte* const found = pool.find(part);
    REQUIRE(found != nullptr);
    found[2095] ^= std::byte{1};

    const Mover::Finished corrupt = f.engine->load(kPrompt, claimed, {{1, 13, 3}});

    CHECK(code_of(corrupt) == Errc::kCorrupt);
    CHECK(corrupt.corrupt == 1);
    CHECK(corrupt.blocks == 1);
    const auto blocks = f.engine->last_blocks();
    CHECK(corrupt.failed_blocks == std::vector(blocks.begin() + 2, blocks.end()));
    CHECK(f.server.metric_becomes("pegaflow_corrupt_pages_total", 1));
    CHECK(f.engine->lookup(kPrompt, kUnits).value().blocks == 0);
  }

  TEST_CASE("a server without several kinds is refused by name, and one kind still works") {
    ServerProcess server;
    OverlaidMemory memory(hybrid_groups(), 10);
    SlowDevice device;
    KindsEngine::Options options;
    options.socket = server.socket();
    options.kinds = hybrid_kinds();
    // The version before features: this server appears as one that has none.
    for (LinkOptions* const link : {&options.session, &options.mover.link}) {
      link->maximum_version = 3;
    }
    KindsEngine engine(options, memory, device);

    REQUIRE(engine.mover().wait_for(LinkState::kRefused, kHang));

    const LinkStatus status = engine.mover().status();
    CHECK(status.detail.find("does not support several kinds of blocks") != std::string::npos);
    CHECK(status.detail.find(status.server_build) != std::string::npos);
    CHECK(engine.start_save(kPrompt, {0, 0, 1}).error().code == Errc::kPeerLost);
    REQUIRE(engine.session().wait_for(LinkState::kReady, kHang));
    CHECK(engine.claim(kPrompt, 8, 4).error().code == Errc::kRefused);
    CHECK(engine.boundaries(kPrompt, 8).error().code == Errc::kRefused);
  }
}

}  // namespace
}  // namespace pegaflow::testing
