// An engine that holds all it can and never responds, or requests everything, beside one that
// works.
#include <csignal>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/forked.h"
#include "tests/support/server_process.h"
#include "tests/support/test_engine.h"
#include "tests/support/wire_client.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

using Blocks = std::vector<std::uint32_t>;
using std::chrono::milliseconds;

constexpr std::size_t kSegments = 2;
constexpr std::size_t kSegmentBytes = 8 * 1024;
constexpr std::size_t kPageBytes = kSegments * kSegmentBytes;
/// Blocks in the pool.
constexpr std::size_t kPool = 1024;
const char* const kPoolSize = "16mb";
/// The limits of one engine and of all together.
constexpr std::size_t kInstanceShare = kPool / 2;
constexpr std::size_t kNodeShare = kPool * 8 / 10;

std::vector<BlockKey> keys_from(std::uint64_t first, std::size_t count) {
  return numbered_keys(numbers_from(first, count));
}

/// A worker and scheduler in one that only sends what the test commands.
class Wire {
 public:
  Wire(kj::AsyncIoContext& io, const ServerProcess& server, const std::string& instance)
      : client_(io, server.socket()) {
    client_.hello();
    auto pool = client_.register_rank({.instance = instance,
                                       .factors = {{"model", "model"}},
                                       .page_bytes = kPageBytes,
                                       .block_count = kPool});
    if (!pool) throw std::runtime_error(pool.error().detail);
    pool_ = std::move(*pool);
    if (!client_.attach(instance)) throw std::runtime_error("attach");
  }

  WireClient* operator->() { return &client_; }
  JobId job() { return {.scheduler = client_.process(), .number = ++jobs_}; }

  /// Saves numbered blocks as a TestEngine does. Returns the number that was not skipped.
  std::size_t save(std::uint64_t first, std::size_t count) {
    const JobId name = job();
    const auto slots = client_.reserve(name, keys_from(first, count));
    if (!slots) throw std::runtime_error(slots.error().detail);
    std::size_t written = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if ((*slots)[i] == ~std::uint32_t{0}) continue;
      fill_page(pool_.slot((*slots)[i]).data(), kPageBytes, first + i);
      ++written;
    }
    // A job without reserved blocks has ended already.
    if (written != 0 && !client_.publish(name)) throw std::runtime_error("publish");
    return written;
  }
  std::size_t claim(const Id128& token, std::uint64_t first, std::size_t count) {
    const auto found = client_.claim(token, keys_from(first, count));
    if (!found) throw std::runtime_error(found.error().detail);
    return found->blocks;
  }
  /// True if the pages of these slots are those of the blocks from `first` on.
  [[nodiscard]] bool holds(const std::vector<std::uint32_t>& slots, std::uint64_t first) const {
    std::vector<std::byte> page(kPageBytes);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      fill_page(page.data(), page.size(), first + i);
      if (std::memcmp(page.data(), pool_.slot(slots[i]).data(), page.size()) != 0) return false;
    }
    return true;
  }

 private:
  WireClient client_;
  MappedPool pool_;
  std::uint64_t jobs_ = 0;
};

/// An engine over the real copy threads, in the namespace of the one above.
struct Working {
  explicit Working(const ServerProcess& its_server) : server(its_server) {
    TestEngine::Options options;
    options.socket = server.socket();
    options.instance = "working";
    // Long deadlines: a busy machine must not turn a hit into a miss here.
    for (LinkOptions* const link : {&options.session, &options.mover.link}) {
      link->connect_deadline = link->lookup_deadline = link->open_deadline =
          link->reserve_deadline = kHang;
    }
    options.mover.load_patience = kHang;
    engine = std::make_unique<TestEngine>(options, memory, *device);
    engine->wait_ready();
  }

  std::size_t save(std::uint64_t first, std::size_t count) {
    const Mover::Finished saved = engine->save(numbers_from(first, count), blocks_from(0, count));
    CHECK_FALSE(saved.error);
    return saved.blocks;
  }
  /// Claims and loads as many blocks as the limits allow, and checks each byte. Returns the number
  /// of blocks once the server holds none of them.
  std::size_t load(std::uint64_t first, std::size_t count) {
    const double claims = server.metric("pegaflow_claims");
    const double pins = server.metric("pegaflow_pins");
    const auto claimed = engine->claim(numbers_from(first, count)).value();
    if (claimed.blocks == 0) return 0;
    const Blocks into = blocks_from(kPool, claimed.blocks);
    const Mover::Finished loaded = engine->load(claimed.token, into);
    engine->session().unclaim(claimed.token);
    CHECK_FALSE(loaded.error);
    CHECK(loaded.blocks == claimed.blocks);
    CHECK(engine->wrong_blocks(numbers_from(first, count), into) == 0);
    CHECK(server.metric_becomes("pegaflow_claims", claims));
    CHECK(server.metric_becomes("pegaflow_pins", pins));
    return loaded.blocks;
  }

  const ServerProcess& server;
  EngineMemory memory = engine_memory(kSegments, kSegmentBytes, 2 * kPool);
  std::unique_ptr<HostDevice> device = HostDevice::create({.threads = 2}).value();
  std::unique_ptr<TestEngine> engine;
};

TEST_SUITE("an engine that never responds") {
  TEST_CASE(
      "does not keep another one from saving and loading within its limits, or from its blocks "
      "later") {
    ServerProcess server({.pool_size = kPoolSize, .arguments = {"--reservation-timeout", "200ms"}});
    constexpr std::size_t kPinned = 200;
    constexpr std::size_t kClaimed = 100;
    constexpr std::size_t kPending = 10;
    // With pins, a claim that it never opens, and a save that it never ends; then it hangs.
    Forked hanging([&] {
      auto* const io = new kj::AsyncIoContext(kj::setupAsyncIo());  // Lives as long as the process.
      auto* const wire = new Wire(*io, server, "hanging");
      const Id128 token = Id128::random();
      if (wire->save(1, 400) != 400 || wire->claim(token, 1, kPinned) != kPinned ||
          !(*wire)->open(token, 0, kPinned, 1) || !(*wire)->unclaim(token) ||
          wire->claim(Id128::random(), 201, kClaimed) != kClaimed ||
          !(*wire)->reserve(wire->job(), keys_from(500, kPending))) {
        throw std::runtime_error("the engine could not get the blocks to hold");
      }
    });
    hanging.signal(SIGSTOP);
    Working working(server);
    REQUIRE(server.metric_becomes(R"(pegaflow_quarantine_slots{reason="timeout"})", kPending));

    // The other engine may write all blocks that are not held; of those it claims as many as all
    // engines may hold together.
    constexpr std::size_t kFree = kPool - kPinned - kClaimed - kPending;
    for (std::uint64_t round = 1; round <= 5; ++round) {
      CAPTURE(round);
      CHECK(working.save(round * 10'000, 600) == 600);
      CHECK(working.load(round * 10'000, 600) == kInstanceShare);
    }
    static_assert(kInstanceShare <= kNodeShare - kPinned - kClaimed);
    CHECK(server.metric("pegaflow_pool_alloc_failures_total") == 0);
    // The hanging engine's blocks serve others, and no engine overwrote them.
    CHECK(working.load(1, kPinned + kClaimed) == kPinned + kClaimed);
    // Its unfinished save blocks no other engine either.
    CHECK(working.save(500, kPending) == kPending);
    CHECK(server.metric("pegaflow_pins") == 1);
    CHECK(server.metric("pegaflow_oldest_pin_seconds") > 0);

    // A save that needs more takes the claim that was never opened. The pins stay.
    CHECK(working.save(90'000, kFree + kClaimed) == kFree + kClaimed);
    CHECK(server.metric("pegaflow_claims_revoked_total") == 1);
    CHECK(server.metric("pegaflow_claims") == 0);
    // A save that needs even more drops the blocks that do not fit, at once.
    CHECK(working.save(100'000, kPool) == kFree + kClaimed);
    CHECK(working.load(1, kPinned) == kPinned);

    hanging.kill();
    CHECK(server.metric_becomes("pegaflow_pins", 0));
    CHECK(server.metric_becomes("pegaflow_claims", 0));
    CHECK(server.metric_becomes(R"(pegaflow_pool_slots{state="quarantined"})", 0));
    CHECK(server.metric_becomes("pegaflow_parted_connections", 0));
    CHECK(working.save(200'000, kPool) == kPool);
    CHECK(working.load(200'000, kPool) == kInstanceShare);
  }
}

TEST_SUITE("an engine that requests the whole pool") {
  TEST_CASE("claims and pins of one engine stop at its share, those of all at the node's") {
    ServerProcess server({.pool_size = kPoolSize});
    auto io = kj::setupAsyncIo();
    Wire greedy(io, server, "greedy");
    Wire modest(io, server, "modest");
    REQUIRE(greedy.save(1, kPool) == kPool);

    // A claim on everything is shortened to the share, and pins still count when their claim has
    // ended.
    const Id128 first = Id128::random();
    CHECK(greedy.claim(first, 1, kPool) == kInstanceShare);
    const auto pinned = greedy->open(first, 0, kInstanceShare, 1);
    REQUIRE(pinned);
    CHECK(greedy->unclaim(first));
    CHECK(greedy.claim(Id128::random(), 1 + kInstanceShare, 10) == 0);
    CHECK(server.metric("pegaflow_claims") == 0);
    CHECK(server.metric("pegaflow_held_blocks") == kInstanceShare);

    // The other engine has its share, of blocks that are held already, and of others up to the
    // node's.
    const Id128 shared = Id128::random();
    CHECK(modest.claim(shared, 1, kPool) == kInstanceShare);
    CHECK(server.metric("pegaflow_held_blocks") == kInstanceShare);
    CHECK(modest->unclaim(shared));
    const Id128 other = Id128::random();
    CHECK(modest.claim(other, 1 + kInstanceShare, kPool - kInstanceShare) ==
          kNodeShare - kInstanceShare);
    const auto opened = modest->open(other, 0, kNodeShare - kInstanceShare, 1);
    REQUIRE(opened);
    CHECK(server.metric("pegaflow_held_blocks") == kNodeShare);

    // The rest of the pool stays for saves of both engines; pinned blocks keep their bytes.
    for (std::uint64_t round = 1; round <= 5; ++round) {
      CHECK(modest.save(round * 20'000, kPool) == kPool - kNodeShare);
      CHECK(greedy.save(round * 20'000 + 10'000, kPool) == kPool - kNodeShare);
    }
    CHECK(greedy.holds(*pinned, 1));
    CHECK(modest.holds(*opened, 1 + kInstanceShare));

    // Released blocks are available to the other engine.
    CHECK(greedy->release(1));
    CHECK(server.metric_becomes("pegaflow_held_blocks", kNodeShare - kInstanceShare));
    CHECK(modest.claim(Id128::random(), 1, kPool) ==
          kInstanceShare - (kNodeShare - kInstanceShare));
    CHECK(modest->release(1));
  }

  TEST_CASE("with the limits at 100 % a pool full of pins takes no save, and no call waits") {
    ServerProcess server(
        {.pool_size = kPoolSize,
         .arguments = {"--instance-share-percent", "100", "--node-share-percent", "100"}});
    auto io = kj::setupAsyncIo();
    Wire greedy(io, server, "greedy");
    Wire modest(io, server, "modest");
    REQUIRE(greedy.save(1, kPool) == kPool);
    const Id128 all = Id128::random();
    REQUIRE(greedy.claim(all, 1, kPool) == kPool);

    SUBCASE("pins stay, and the save is dropped") {
      const auto pinned = greedy->open(all, 0, kPool, 1);
      REQUIRE(pinned);
      CHECK(modest.save(5000, 100) == 0);
      CHECK(server.metric("pegaflow_pool_alloc_failures_total") == 100);
      CHECK(modest->lookup(keys_from(5000, 100)).blocks == 0);
      CHECK(greedy.holds(*pinned, 1));
      CHECK(greedy->unclaim(all));
      CHECK(greedy->release(1));
      CHECK(server.metric_becomes("pegaflow_held_blocks", 0));
      CHECK(modest.save(5000, kPool) == kPool);
    }
    SUBCASE("a claim is revoked, and its owner is notified") {
      CHECK(modest.save(5000, 100) == 100);
      const auto opened = greedy->open(all, 0, kPool, 1);
      REQUIRE_FALSE(opened);
      CHECK(opened.error().code == Errc::kGone);
      CHECK(server.metric("pegaflow_claims_revoked_total") == 1);
    }
    SUBCASE("the end of its process releases everything") {
      REQUIRE(greedy->open(all, 0, kPool, 1));
      CHECK(greedy->goodbye());
      // In slices, so that no client waits for all of them.
      CHECK(server.metric_becomes("pegaflow_held_blocks", 0));
      CHECK(modest.save(5000, kPool) == kPool);
      CHECK(server.metric("pegaflow_pins") == 0);
    }
  }
}

}  // namespace
}  // namespace pegaflow::testing
