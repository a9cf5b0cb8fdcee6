// Engines whose pages differ by a factor of 131,072, side by side in one pool that is too small.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "engine/pool/memory_room.h"
#include "tests/support/seed.h"
#include "tests/support/server_process.h"
#include "tests/support/skip.h"
#include "tests/support/test_engine.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;

struct Size {
  const char* name;
  std::size_t segments;
  std::size_t segment_bytes;
  std::size_t blocks;  ///< Blocks of one round.
};

/// From the smallest page that a slot can have to half of the largest one.
constexpr Size kSizes[] = {
    {.name = "4k", .segments = 1, .segment_bytes = 4 * kKiB, .blocks = 4096},
    {.name = "odd", .segments = 3, .segment_bytes = 24 * kKiB - 8, .blocks = 1024},
    {.name = "2m", .segments = 8, .segment_bytes = 256 * kKiB, .blocks = 64},
    {.name = "40m", .segments = 10, .segment_bytes = 4 * kMiB, .blocks = 6},
    {.name = "512m", .segments = 16, .segment_bytes = 32 * kMiB, .blocks = 1},
};

/// An engine over the real copy threads, with memory for one round's blocks and one more.
struct Sized {
  Sized(const ServerProcess& server, const Size& of)
      : size(of), memory(engine_memory(of.segments, of.segment_bytes, of.blocks + 1)) {
    TestEngine::Options options;
    options.socket = server.socket();
    options.instance = options.model = of.name;
    // Long deadlines: a busy machine must not turn a hit into a miss here.
    for (LinkOptions* const link : {&options.session, &options.mover.link}) {
      link->connect_deadline = link->lookup_deadline = link->open_deadline =
          link->reserve_deadline = kHang;
    }
    options.mover.load_patience = kHang;
    engine = std::make_unique<TestEngine>(options, memory, *device);
    engine->wait_ready();
  }

  /// Saves new blocks, by their numbers. All of them get frames at once, however many blocks of
  /// other sizes must be evicted first.
  void save(std::uint64_t round) {
    std::vector<std::uint32_t> blocks(size.blocks);
    for (std::uint32_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
    CHECK_FALSE(engine->save(numbers(round), blocks).error);
    CHECK(engine->lookup(numbers(round)).value().blocks == size.blocks);
  }

  /// Loads the blocks of a round that are cached, into other blocks than they were saved from.
  /// Returns their number.
  std::size_t load(std::uint64_t round) {
    const auto claimed = engine->claim(numbers(round)).value();
    if (claimed.blocks == 0) return 0;
    std::vector<std::uint32_t> blocks(claimed.blocks);
    for (std::uint32_t i = 0; i < blocks.size(); ++i) blocks[i] = i + 1;
    const Mover::Finished loaded = engine->load(claimed.token, blocks);
    engine->session().unclaim(claimed.token);
    CHECK_FALSE(loaded.error);
    CHECK(loaded.blocks == claimed.blocks);
    CHECK(engine->wrong_blocks(numbers(round), blocks) == 0);
    return loaded.blocks;
  }

  [[nodiscard]] std::vector<std::uint64_t> numbers(std::uint64_t round) const {
    return numbers_from(round * 1'000'000 + size.segment_bytes, size.blocks);
  }

  const Size& size;
  EngineMemory memory;
  std::unique_ptr<HostDevice> device = HostDevice::create({.threads = 2}).value();
  std::unique_ptr<TestEngine> engine;
};

TEST_SUITE("page sizes") {
  TEST_CASE("from 4 KiB to 512 MiB side by side: right bytes, while they evict each other") {
    const auto room = engine::memory_room();
    REQUIRE(room);
    if (room->available_bytes < 5 * kKiB * kMiB) PEGA_SKIP("less than 5 GiB are free");
    // A round writes 0.95 GiB: no engine can keep its blocks.
    ServerProcess server({.pool_size = "1536mb"});
    std::vector<std::unique_ptr<Sized>> engines;
    for (const Size& size : kSizes) engines.push_back(std::make_unique<Sized>(server, size));
    std::mt19937_64 random(seed());
    const auto in_some_order = [&](auto&& act) {
      std::shuffle(engines.begin(), engines.end(), random);
      for (const auto& engine : engines) act(*engine);
    };

    constexpr std::uint64_t kRounds = 4;
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      CAPTURE(round);
      in_some_order([&](Sized& engine) {
        INFO(std::string(engine.size.name));
        // A load's pin ends after its report, and pinned blocks cannot be evicted.
        REQUIRE(server.metric_becomes("pegaflow_held_blocks", 0));
        engine.save(round);
        CHECK(engine.load(round) == engine.size.blocks);
      });
      // Then the blocks that the other engines left of the former rounds.
      for (std::uint64_t former = 1; former < round; ++former) {
        in_some_order([&](Sized& engine) {
          INFO(std::string(engine.size.name));
          engine.load(former);
        });
      }
    }

    CHECK(server.metric("pegaflow_cache_block_evictions_total") > 0);
    CHECK(server.metric("pegaflow_pool_extents_taken_total") > 0);
    for (const auto& engine : engines) CHECK(engine->memory.gaps_are_whole());
    CHECK(server.metric_becomes("pegaflow_held_blocks", 0));
    CHECK(server.post("/cache/memory/cleanup").status == 200);
    CHECK(server.metric("pegaflow_pool_used_bytes") == 0);
  }
}

}  // namespace
}  // namespace pegaflow::testing
