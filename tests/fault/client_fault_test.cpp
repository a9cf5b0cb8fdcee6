// Behavior of the client when the server, the connection or the device fails.
#include <algorithm>
#include <csignal>
#include <fstream>
#include <string>
#include <thread>

#include <doctest/doctest.h>

#include "tests/support/server_process.h"
#include "tests/support/slow_device.h"
#include "tests/support/test_engine.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Blocks = std::vector<std::uint32_t>;

Errc code_of(const Mover::Finished& job) {
  REQUIRE(job.error);
  return job.error->code;
}

/// The shared memory in this process's page table: the pool's, except for a little.
std::uint64_t shared_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssShmem:")) return std::stoull(line.substr(9)) * 1024;
  }
  FAIL("no RssShmem in /proc/self/status");
  return 0;
}

struct Fixture {
  explicit Fixture(TestEngine::Options options = {}, ServerProcess::Options server_options = {})
      : server(std::move(server_options)), memory(engine_memory(2, 8 * 1024, 100)) {
    options.socket = server.socket();
    options.session.reconnect_interval = milliseconds(20);
    options.mover.link.reconnect_interval = milliseconds(20);
    engine = std::make_unique<TestEngine>(std::move(options), memory, device);
    if (server.pid() > 0) engine->wait_ready();
  }
  ~Fixture() {
    device.allow_all();
    if (server.pid() > 0) server.signal(SIGCONT);
  }

  ServerProcess server;
  EngineMemory memory;
  SlowDevice device;
  std::unique_ptr<TestEngine> engine;
};

/// Returns when both sides have noticed that the server, or their connection, is gone.
void wait_lost(TestEngine& engine, std::uint64_t connections) {
  // Ready again counts as well: the wait is for the end of that many connections.
  const auto lost = [&](const LinkStatus& status) {
    return status.state != LinkState::kReady || status.connections > connections;
  };
  const auto end = std::chrono::steady_clock::now() + kHang;
  while (!lost(engine.mover().status()) || !lost(engine.session().status())) {
    REQUIRE(std::chrono::steady_clock::now() < end);
    std::this_thread::yield();
  }
}

TEST_SUITE("the server fails") {
  TEST_CASE("a server that is absent at the start is used as soon as it runs") {
    ServerProcess server;
    server.kill();
    EngineMemory memory = engine_memory(1, 4096, 4);
    SlowDevice device;
    TestEngine::Options options;
    options.socket = server.socket();
    options.session.reconnect_interval = options.mover.link.reconnect_interval = milliseconds(20);
    TestEngine engine(options, memory, device);
    CHECK(engine.session().lookup(numbered_keys({1})).error().code == Errc::kPeerLost);
    CHECK(engine.start_save(1, {1}, {0}).error().code == Errc::kPeerLost);

    server.start();

    engine.wait_ready();
    CHECK(engine.save({1}, {0}).blocks == 1);
    CHECK(engine.mover().status().connections == 1);
  }

  TEST_CASE(
      "a server that is killed and restarted ten times is used each time, and no old block is "
      "found") {
    Fixture f;
    for (std::uint64_t round = 1; round <= 10; ++round) {
      const auto numbers = numbers_from(round * 100, 20);
      CHECK(f.engine->save(numbers, blocks_from(0, 20)).blocks == 20);
      f.server.kill();
      wait_lost(*f.engine, round);

      f.server.start();
      f.engine->wait_ready();

      CHECK(f.engine->mover().status().connections == round + 1);
      CHECK(f.engine->lookup(numbers).value().blocks == 0);
      CHECK(f.server.metric("pegaflow_quarantine_slots{reason=\"writer_lost\"}") == 0);
    }
    CHECK(f.device.attaches() == 11);
  }

  TEST_CASE(
      "killed while its pool is entered into our page table: no call waits, the next server is "
      "used") {
    // The populating thread takes a tenth of a second or more; the kill comes some ms after it
    // began.
    constexpr std::uint64_t kPool = std::uint64_t{1} << 30;
    Fixture f({}, {.pool_size = std::to_string(kPool)});
    std::uint64_t in_the_middle = 0;
    for (std::uint64_t round = 1; round <= 2; ++round) {
      in_the_middle += shared_resident_bytes() < kPool ? 1 : 0;
      f.server.kill();
      wait_lost(*f.engine, round);
      CHECK(f.engine->start_save(round, {1}, {0}).error().code == Errc::kPeerLost);

      f.server.start();
      f.engine->wait_ready();
    }
    MESSAGE(in_the_middle << " of 2 kills came before the whole pool was entered");
    CHECK(f.engine->save(numbers_from(100, 4), blocks_from(0, 4)).blocks == 4);
    f.engine->mover().close();
    CHECK(shared_resident_bytes() < kPool / 8);
  }

  TEST_CASE("killed in the middle of a load: the load fails, but not before its copies ended") {
    Fixture f;
    f.engine->save(numbers_from(1, 10), blocks_from(0, 10));
    const auto claimed = f.engine->claim(numbers_from(1, 10)).value();
    f.device.hold();
    f.device.allow_pages(3);
    REQUIRE(f.engine->mover().load(7, claimed.token, 0, blocks_from(20, 10)));
    REQUIRE(f.device.wait_held(kHang));

    f.server.kill();
    REQUIRE(f.device.wait_detaching(kHang));
    f.server.start();
    // The session is back while the mover still waits for its last page.
    REQUIRE(f.engine->session().wait_for(LinkState::kReady, kHang));
    CHECK(f.engine->mover().take_finished().empty());
    CHECK(f.engine->mover().status().connections == 1);
    f.device.allow_all();

    const Mover::Finished failed = f.engine->next_finished();
    CHECK(failed.id == 7);
    CHECK(code_of(failed) == Errc::kPeerLost);
    CHECK(failed.blocks == 0);
    CHECK(failed.failed_blocks == blocks_from(20, 10));
    f.engine->wait_ready();
    CHECK(f.engine->save(numbers_from(1, 10), blocks_from(0, 10)).blocks == 10);
  }

  TEST_CASE("killed after the last page of a load was copied: that load fails, too") {
    Fixture f;
    f.engine->save({1}, {0});
    const auto claimed = f.engine->claim({1}).value();
    f.device.hold();
    REQUIRE(f.engine->mover().load(7, claimed.token, 0, Blocks{9}));
    REQUIRE(f.device.wait_held(kHang));
    f.server.signal(SIGSTOP);
    f.server.kill();
    f.device.allow_all();
    // The page is right, but a server that is gone cannot confirm that.
    CHECK(code_of(f.engine->next_finished()) == Errc::kPeerLost);
  }

  TEST_CASE("killed after an early completion: the reported load stays valid") {
    Fixture f;
    f.engine->save({1}, {0});
    const auto claimed = f.engine->claim({1}).value();
    f.device.hold();
    REQUIRE(f.engine->mover().load(7, claimed.token, 0, Blocks{9}));
    REQUIRE(f.device.wait_held(kHang));
    const auto follow = [&] { return f.engine->mover().follow({}, std::chrono::hours(1)); };
    CHECK(follow().empty());  // The device is not that far.
    f.device.allow_early_completion();
    const std::vector<Mover::Followed> followed = follow();
    REQUIRE(followed.size() == 1);
    CHECK(followed[0].load == 7);
    CHECK(followed[0].blocks == 1);
    CHECK(followed[0].bytes == f.engine->mover().page_bytes()[0]);
    CHECK(follow().empty());  // Reported once.

    f.server.kill();
    REQUIRE(f.device.wait_detaching(kHang));
    f.device.allow_all();

    const Mover::Finished ended = f.engine->next_finished();
    CHECK(ended.id == 7);
    CHECK_FALSE(ended.error);
    CHECK(ended.blocks == 1);
    CHECK(f.engine->wrong_blocks({1}, {9}) == 0);
  }

  TEST_CASE("killed in the middle of a save: the save is dropped and its blocks are the engine's") {
    Fixture f;
    f.device.hold();
    f.device.allow_pages(1);
    REQUIRE(f.engine->start_save(3, numbers_from(1, 5), blocks_from(0, 5)));
    REQUIRE(f.device.wait_held(kHang));

    f.server.kill();
    REQUIRE(f.device.wait_detaching(kHang));
    CHECK(f.engine->mover().take_finished().empty());
    f.device.allow_all();

    const Mover::Finished dropped = f.engine->next_finished();
    CHECK(dropped.id == 3);
    CHECK(dropped.blocks == 0);
    CHECK(code_of(dropped) == Errc::kPeerLost);
  }

  TEST_CASE(
      "stopped: every call and job ends by its deadline, and the server is used when it "
      "continues") {
    TestEngine::Options options;
    for (LinkOptions* const link : {&options.session, &options.mover.link}) {
      // Long enough for the calls while the server runs, and three of them in one window however
      // late a busy machine counts them.
      link->lookup_deadline = link->reserve_deadline = milliseconds(500);
      link->breaker_window = kHang;
      link->breaker_probe_interval = milliseconds(50);
    }
    Fixture f(options);
    f.engine->save(numbers_from(1, 10), blocks_from(0, 10));
    const auto before = f.engine->claim(numbers_from(1, 10)).value();

    f.server.signal(SIGSTOP);

    // Three missed deadlines open the breaker, and then no call waits.
    int timeouts = 0;
    while (f.engine->session().status().state == LinkState::kReady) {
      const auto answer = f.engine->claim(numbers_from(1, 10));
      REQUIRE_FALSE(answer);
      timeouts += answer.error().code == Errc::kTimeout ? 1 : 0;
      REQUIRE(timeouts <= 10);
    }
    CHECK(timeouts >= 2);  // The call that releases an unanswered claim misses its deadline, too.
    CHECK(f.engine->session().status().state == LinkState::kBroken);
    CHECK(f.engine->lookup({1}).error().code == Errc::kPeerLost);

    int dropped = 0;
    for (std::uint64_t job = 10; f.engine->start_save(job, {job}, {20}).has_value(); ++job) {
      const Mover::Finished ended = f.engine->next_finished();
      CHECK(code_of(ended) == Errc::kTimeout);
      CHECK(ended.blocks == 0);
      ++dropped;
      REQUIRE(dropped <= 10);
      if (f.engine->mover().status().state == LinkState::kBroken) break;
    }
    CHECK(dropped >= 3);
    CHECK(f.engine->mover().load(99, before.token, 0, blocks_from(30, 10)).error().code ==
          Errc::kPeerLost);
    CHECK(f.device.batches() == 1);

    f.server.signal(SIGCONT);

    f.engine->wait_ready();
    // Each unanswered call of the stopped server is followed by one that releases its result.
    CHECK(f.server.metric_becomes("pegaflow_claims", 1));
    CHECK(f.server.metric_becomes("pegaflow_reservations", 0));
    CHECK(f.server.metric("pegaflow_pool_slots{state=\"quarantined\"}") == 0);
    CHECK(f.engine->load(before.token, blocks_from(30, 10)).blocks == 10);
    CHECK(f.engine->wrong_blocks(numbers_from(1, 10), blocks_from(30, 10)) == 0);
    CHECK(f.engine->mover().status().connections == 1);
  }

  TEST_CASE(
      "stopped in the middle of a load: copied pages are good, and its pin is released later") {
    Fixture f;
    f.engine->save(numbers_from(1, 10), blocks_from(0, 10));
    const auto claimed = f.engine->claim(numbers_from(1, 10)).value();
    f.device.hold();
    REQUIRE(f.engine->mover().load(7, claimed.token, 0, blocks_from(20, 10)));
    REQUIRE(f.device.wait_held(kHang));

    f.server.signal(SIGSTOP);
    f.device.allow_all();

    CHECK(f.engine->next_finished().blocks == 10);
    CHECK(f.engine->wrong_blocks(numbers_from(1, 10), blocks_from(20, 10)) == 0);
    f.server.signal(SIGCONT);
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
  }

  TEST_CASE("ended by SIGTERM: its clients count it as lost, and reconnect to the next server") {
    Fixture f;
    f.engine->save({1}, {0});
    CHECK(f.server.terminate() == 0);
    wait_lost(*f.engine, 1);
    f.server.start();
    f.engine->wait_ready();
    CHECK(f.engine->save({1}, {0}).blocks == 1);
  }
}

TEST_SUITE("the connection fails, and both ends live") {
  TEST_CASE("a client whose copy continues writes only where no other client reads") {
    ServerProcess::Options small;
    small.pool_size = "1mb";  // 64 pages: the other engine needs all of them.
    Fixture f({}, small);
    constexpr std::size_t kMany = 64;
    EngineMemory other_memory = engine_memory(2, 8 * 1024, 2 * kMany);
    auto other_device = HostDevice::create({}).value();
    TestEngine::Options other_options;
    other_options.socket = f.server.socket();
    other_options.instance = "other";
    other_options.mover.link.reconnect_interval = milliseconds(20);
    TestEngine other(other_options, other_memory, *other_device);
    other.wait_ready();
    // Ten pages are in flight, the first one with the device, when the connection ends.
    f.device.hold();
    REQUIRE(f.engine->start_save(1, numbers_from(1000, 10), blocks_from(0, 10)));
    REQUIRE(f.device.wait_held(kHang));

    REQUIRE(cut_connections(f.server.socket()) == 4);  // Includes the other engine's two.
    REQUIRE(f.device.wait_detaching(kHang));
    wait_lost(other, 1);  // Otherwise it may still be ready on the former connection.
    other.wait_ready();

    // The late writer's slots stay reserved while the other engine fills the pool many times.
    CHECK(f.server.metric_becomes("pegaflow_quarantine_slots{reason=\"writer_lost\"}", 10));
    std::size_t saved_blocks = 0;
    std::size_t wrong = 0;
    for (std::uint64_t round = 1; round <= 20; ++round) {
      const auto numbers = numbers_from(round * 10'000, kMany);
      const Mover::Finished saved = other.save(numbers, blocks_from(0, kMany));
      REQUIRE_FALSE(saved.error);
      saved_blocks += saved.blocks;
      if (round == 10) {
        f.device.allow_all();  // The late write lands now.
        REQUIRE(f.device.wait_copied(1, kHang));
      }
      const auto claimed = other.claim(numbers).value();
      if (claimed.blocks == 0) continue;
      const Blocks into = blocks_from(kMany, claimed.blocks);
      const Mover::Finished loaded = other.load(claimed.token, into);
      CHECK(loaded.blocks == claimed.blocks);
      wrong += other.wrong_blocks(numbers, into);
      other.session().unclaim(claimed.token);
    }
    CHECK(saved_blocks > 20 * (kMany - 10) / 2);
    CHECK(wrong == 0);

    // Reported once, after the copy ended; then the client reports that it is quiet.
    CHECK(code_of(f.engine->next_finished()) == Errc::kPeerLost);
    f.engine->wait_ready();
    CHECK(f.server.metric_becomes("pegaflow_quarantine_slots{reason=\"writer_lost\"}", 0));
    CHECK(f.server.metric_becomes("pegaflow_parted_connections", 0));
    CHECK(f.engine->lookup(numbers_from(1000, 10)).value().blocks == 0);
    CHECK(f.engine->save(numbers_from(1000, 5), blocks_from(0, 5)).blocks == 5);
  }

  TEST_CASE("a client whose copy continues keeps its pages, and its load fails") {
    ServerProcess::Options small;
    small.pool_size = "1mb";
    Fixture f({}, small);
    f.engine->save(numbers_from(1, 10), blocks_from(0, 10));
    const auto claimed = f.engine->claim(numbers_from(1, 10)).value();
    f.device.hold();
    REQUIRE(f.engine->mover().load(7, claimed.token, 0, blocks_from(20, 10)));
    REQUIRE(f.device.wait_held(kHang));

    REQUIRE(cut_connections(f.server.socket()) == 2);
    REQUIRE(f.device.wait_detaching(kHang));
    CHECK(f.server.metric_becomes("pegaflow_quarantine_slots{reason=\"reader_lost\"}", 10));
    f.device.allow_all();

    CHECK(code_of(f.engine->next_finished()) == Errc::kPeerLost);
    f.engine->wait_ready();
    CHECK(f.server.metric_becomes("pegaflow_quarantine_slots{reason=\"reader_lost\"}", 0));
    CHECK(f.server.metric_becomes("pegaflow_pins", 0));
    CHECK(f.engine->lookup(numbers_from(1, 10)).value().blocks == 10);
  }

  TEST_CASE("a connection that is cut a hundred times in a row is restored each time") {
    Fixture f;
    for (std::uint64_t round = 1; round <= 100; ++round) {
      REQUIRE(cut_connections(f.server.socket()) == 2);
      wait_lost(*f.engine, round);
      f.engine->wait_ready();
    }
    CHECK(f.engine->save({1}, {0}).blocks == 1);
    CHECK(f.server.metric_becomes("pegaflow_connections", 2));
    CHECK(f.server.metric("pegaflow_parted_connections") == 0);
  }
}

}  // namespace
}  // namespace pegaflow::testing
