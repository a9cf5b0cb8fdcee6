// A page of the pool that another process overwrote: with checksums it is a miss, for every engine.
#include <algorithm>
#include <stdexcept>
#include <string>

#include <doctest/doctest.h>

#include "tests/support/mapped_pool.h"
#include "tests/support/server_process.h"
#include "tests/support/test_engine.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

using Blocks = std::vector<std::uint32_t>;
constexpr std::size_t kSegments = 3;
constexpr std::size_t kSegmentBytes = 8 * 1024 - 8;  // Pages that do not fill their slots.
constexpr std::size_t kPageBytes = kSegments * kSegmentBytes;

/// Writes where a client must not.
class StrayClient {
 public:
  explicit StrayClient(const ServerProcess& server) : pool_(server) {}

  /// Changes one bit of the page of block `number`.
  void overwrite(std::uint64_t number, std::size_t byte = kPageBytes / 2) {
    std::vector<std::byte> page(kPageBytes);
    fill_page(page.data(), page.size(), number);
    std::byte* const found = pool_.find(page);
    if (found == nullptr) throw std::runtime_error("the pool does not have that page");
    found[byte] ^= std::byte{1};
  }

 private:
  MappedPool pool_;
};

/// An engine over the real copy threads.
struct VerifyingEngine {
  VerifyingEngine(const ServerProcess& server, const std::string& name, Mover::Verify verify,
                  std::uint32_t sample_one_in = 16) {
    TestEngine::Options options;
    options.socket = server.socket();
    options.instance = name;
    options.mover.verify = verify;
    options.mover.sample_one_in = sample_one_in;
    engine = std::make_unique<TestEngine>(options, memory, *device);
    engine->wait_ready();
  }
  Mover::Finished claim_and_load(const std::vector<std::uint64_t>& numbers, const Blocks& blocks) {
    const auto claimed = engine->claim(numbers).value();
    REQUIRE(claimed.blocks == blocks.size());
    Mover::Finished done = engine->load(claimed.token, blocks);
    engine->session().unclaim(claimed.token);
    return done;
  }

  EngineMemory memory = engine_memory(kSegments, kSegmentBytes, 128);
  std::unique_ptr<HostDevice> device = HostDevice::create({.threads = 2}).value();
  std::unique_ptr<TestEngine> engine;
};

TEST_SUITE("a page that was overwritten") {
  TEST_CASE("verify=all: the load fails from there on, and the block is forgotten") {
    ServerProcess server;
    VerifyingEngine a(server, "a", Mover::Verify::kAll);
    VerifyingEngine b(server, "b", Mover::Verify::kAll);
    const auto numbers = numbers_from(1, 10);
    REQUIRE(a.engine->save(numbers, blocks_from(0, 10)).blocks == 10);
    const auto claimed_before = b.engine->claim(numbers).value();
    StrayClient stray(server);
    stray.overwrite(7);
    stray.overwrite(9, kPageBytes - 1);

    const Mover::Finished done = a.claim_and_load(numbers, blocks_from(20, 10));

    REQUIRE(done.error);
    CHECK(done.error->code == Errc::kCorrupt);
    CHECK(done.blocks == 6);
    CHECK(done.failed_blocks == blocks_from(26, 4));
    CHECK(done.verified == 10);
    CHECK(done.corrupt == 2);
    CHECK(a.engine->wrong_blocks(numbers, blocks_from(20, 10), done.failed_blocks) == 0);
    // The report was queued with the load's report; the server receives it now.
    CHECK(server.metric_becomes("pegaflow_corrupt_pages_total", 2));
    CHECK(a.engine->lookup(numbers).value().blocks == 6);
    CHECK(server.metric("pegaflow_cache_blocks_dropped_total{reason=\"corrupt\"}") == 2);
    // Also for the engine that had claimed it before.
    const Mover::Finished late = b.engine->load(claimed_before.token, blocks_from(0, 10));
    REQUIRE(late.error);
    CHECK(late.error->code == Errc::kGone);
    CHECK(late.blocks == 0);

    // Computed and saved again, the blocks are right for every engine.
    CHECK(a.engine->save(numbers, blocks_from(0, 10)).blocks == 2);
    const Mover::Finished whole = b.claim_and_load(numbers, blocks_from(40, 10));
    CHECK_FALSE(whole.error);
    CHECK(whole.blocks == 10);
    CHECK(whole.verified == 10);
    CHECK(b.engine->wrong_blocks(numbers, blocks_from(40, 10)) == 0);
  }

  TEST_CASE("every byte of a page is checked, the first and the last of each segment included") {
    ServerProcess server;
    VerifyingEngine a(server, "a", Mover::Verify::kAll);
    StrayClient stray(server);
    std::uint64_t number = 1;
    for (std::size_t segment = 0; segment < kSegments; ++segment) {
      for (const std::size_t byte : {std::size_t{0}, kSegmentBytes - 1}) {
        REQUIRE(a.engine->save({++number}, {0}).blocks == 1);
        stray.overwrite(number, segment * kSegmentBytes + byte);
        CHECK(a.claim_and_load({number}, {1}).corrupt == 1);
      }
    }
  }

  TEST_CASE("pages that were saved without a checksum are loaded unchecked") {
    ServerProcess server;
    VerifyingEngine off(server, "off", Mover::Verify::kOff);
    VerifyingEngine all(server, "all", Mover::Verify::kAll);
    REQUIRE(off.engine->save(numbers_from(1, 5), blocks_from(0, 5)).blocks == 5);
    REQUIRE(all.engine->save(numbers_from(6, 5), blocks_from(0, 5)).blocks == 5);

    CHECK(all.claim_and_load(numbers_from(1, 10), blocks_from(20, 10)).verified == 5);
    CHECK(off.claim_and_load(numbers_from(1, 10), blocks_from(20, 10)).verified == 0);
  }

  TEST_CASE("verify=sample checks a part of the pages") {
    ServerProcess server;
    VerifyingEngine half(server, "half", Mover::Verify::kSample, 2);
    REQUIRE(half.engine->save(numbers_from(1, 64), blocks_from(0, 64)).blocks == 64);
    const Mover::Finished done = half.claim_and_load(numbers_from(1, 64), blocks_from(64, 64));
    CHECK_FALSE(done.error);
    // All or none of them: once in 2^63 runs.
    CHECK(done.verified > 0);
    CHECK(done.verified < 64);
  }

  TEST_CASE("a sample of one page in zero is rejected") {
    EngineMemory memory = engine_memory(1, 4096, 1);
    const auto device = HostDevice::create({}).value();
    Mover::Options options;
    options.link.socket_path = "/nowhere/pega.sock";
    options.link.instance = "x";
    options.sample_one_in = 0;
    const auto refused = Mover::start(options, memory.layout(), *device);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::testing
