#include <algorithm>
#include <chrono>
#include <numeric>

#include <doctest/doctest.h>

#include "perf/replay/replay_pool.h"
#include "tests/support/patience.h"

namespace pegaflow::perf {
namespace {

constexpr std::uint64_t kBlocks = 256;
constexpr std::uint64_t kPageBytes = 4096;

Prompt blocks(std::uint64_t first, std::size_t count) {
  Prompt prompt(count);
  std::iota(prompt.begin(), prompt.end(), first);
  return prompt;
}

struct Fixture {
  explicit Fixture(std::uint64_t ssd_blocks = 0)
      : pool(ReplayPool::start(io, {.program = PEGA_SERVER_BINARY,
                                    .blocks = kBlocks,
                                    .eviction = "lru",
                                    .seed = 1,
                                    .ssd_blocks = ssd_blocks})
                 .value()) {}
  kj::AsyncIoContext io = kj::setupAsyncIo();
  std::unique_ptr<ReplayPool> pool;

  void ask(const Prompt& prompt) { REQUIRE(pool->replay({&prompt, 1})); }

  /// Another engine of the same server, with its pool.
  struct Other {
    std::unique_ptr<harness::WireClient> client;
    harness::Mapping pool;
  };
  Other other() {
    auto client = harness::WireClient::connect(io, pool->socket_path()).value();
    const auto registered = client->register_worker("other", kPageBytes, 1).value();
    harness::Mapping mapped =
        harness::Mapping::shared(registered.pool.get(), registered.pool_bytes).value();
    return {std::move(client), std::move(mapped)};
  }
};

TEST_SUITE("replay") {
  TEST_CASE("earlier prompts are found, up to the first block that is missing") {
    Fixture f;
    f.ask(blocks(0, 10));
    CHECK(f.pool->seen().found == 0);
    CHECK(f.pool->seen().saved == 10);

    Prompt longer = blocks(0, 4);
    longer.push_back(100);
    longer.push_back(5);  // Exists, but behind a missing block.
    f.ask(longer);

    CHECK(f.pool->seen().found == 4);
    CHECK(f.pool->seen().asked == 16);
    CHECK(f.pool->seen().saved == 11);
    const ReplayPool::Counted counted = f.pool->count().value();
    CHECK(counted.resident == 11);
    CHECK(counted.evictions == 0);
    CHECK(counted.saved_bytes == 11 * kPageBytes);
    CHECK(counted.loaded_bytes == 4 * kPageBytes);
    CHECK(f.pool->seen().question_us.size() == 2);
    CHECK(f.pool->seen().load_us.size() == 1);
    CHECK(f.pool->seen().save_us.size() == 2);
  }

  TEST_CASE(
      "with a disk below it the pool finds blocks that it has evicted, and they are counted") {
    Fixture f(2000);
    constexpr std::size_t kPart = 20;  // Less than what may be in flight from a disk at once.
    constexpr std::size_t kAll = 40 * kPart;
    const auto end = std::chrono::steady_clock::now() + testing::kHang;
    for (std::size_t first = 0; first < kAll; first += kPart) {
      f.ask(blocks(first, kPart));
      // Half of the pool is written ahead of its eviction, in steps of an eighth of that.
      while (f.pool->count().value().ssd_written + kBlocks / 2 + kBlocks / 8 < first + kPart) {
        REQUIRE(std::chrono::steady_clock::now() < end);
      }
    }
    CHECK(f.pool->seen().found == 0);
    CHECK(f.pool->count().value().evictions >= kAll - kBlocks);

    for (std::size_t first = 0; first < 10 * kPart; first += kPart) f.ask(blocks(first, kPart));

    const ReplayPool::Counted counted = f.pool->count().value();
    CHECK(f.pool->seen().found == 10 * kPart);
    CHECK(counted.ssd_restored == 10 * kPart);  // All of them had left the pool.
    CHECK(f.pool->seen().lost == 0);
  }

  TEST_CASE("the pool holds exactly its number of blocks, and LRU evicts the oldest") {
    Fixture f;
    f.ask(blocks(0, kBlocks / 2));
    f.ask(blocks(1000, kBlocks / 2));
    f.ask(blocks(2000, 1));
    const ReplayPool::Counted counted = f.pool->count().value();
    CHECK(counted.resident == kBlocks);
    CHECK(counted.evictions == 1);
    // The end of the oldest chain was evicted.
    f.ask(blocks(0, kBlocks / 2));
    CHECK(f.pool->seen().found == kBlocks / 2 - 1);
  }

  TEST_CASE("a prompt with all its blocks cached is loaded, and nothing of it is saved") {
    Fixture f;
    f.ask(blocks(0, 3));
    f.ask(blocks(0, 3));
    CHECK(f.pool->seen().found == 3);
    CHECK(f.pool->seen().saved == 3);
    CHECK(f.pool->seen().save_us.size() == 1);
    CHECK(f.pool->count());
  }

  TEST_CASE("a page with other bytes than were saved ends the run") {
    Fixture f;
    f.ask(blocks(0, 3));
    const Fixture::Other other = f.other();
    std::ranges::fill(other.pool.bytes(), std::byte{0x5A});
    const Prompt again = blocks(0, 3);
    CHECK(f.pool->replay({&again, 1}).error().code == Errc::kCorrupt);
  }

  TEST_CASE("a block that the server counted and the replay did not is an error") {
    Fixture f;
    f.ask(blocks(0, 3));
    const Fixture::Other other = f.other();
    const KeySource keys(2);
    REQUIRE(other.client->reserve(other.client->job(1), keys.range(0, 2)));
    CHECK(f.pool->count().error().detail.find("reservations left") != std::string::npos);
    REQUIRE(other.client->publish(other.client->job(1)));
    const Result<ReplayPool::Counted> counted = f.pool->count();
    CHECK(counted.error().code == Errc::kInternal);
    CHECK(counted.error().detail == "blocks saved: the server counts 5, the engine 3");
  }

  TEST_CASE("a claim or a pin that is left is an error") {
    Fixture f;
    f.ask(blocks(0, 3));
    const Fixture::Other other = f.other();
    const Id128 token = Id128::random();
    const KeySource keys(1);
    REQUIRE(other.client->claim(token, keys.range(0, 3)).value().blocks == 3);
    CHECK(f.pool->count().error().detail == "claims left: the server counts 1, the engine 0");
    const auto slots = other.client->open(token, 1, 2, 7);
    REQUIRE(slots);
    CHECK(slots->size() == 2);
    REQUIRE(other.client->end_load(7, token));
    // The other engine's loads are counted, too.
    CHECK(f.pool->count().error().detail == "bytes loaded: the server counts 8192, the engine 0");
  }

  TEST_CASE("an unknown policy is the server's error, with its log") {
    kj::AsyncIoContext io = kj::setupAsyncIo();
    const auto pool = ReplayPool::start(
        io, {.program = PEGA_SERVER_BINARY, .blocks = kBlocks, .eviction = "none", .seed = 1});
    REQUIRE_FALSE(pool);
    CHECK(pool.error().detail.find("weighted-lru") != std::string::npos);
  }
}

}  // namespace
}  // namespace pegaflow::perf
