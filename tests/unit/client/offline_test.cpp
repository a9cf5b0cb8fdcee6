// The client's behavior without a server.
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "client/cache_session.h"
#include "client/mover.h"
#include "tests/support/engine_memory.h"
#include "tests/support/slow_device.h"

namespace pegaflow {
namespace {

using std::chrono::seconds;

LinkOptions nowhere() {
  LinkOptions options;
  options.socket_path = "/nonexistent/pegaflow.sock";
  options.instance = "engine";
  return options;
}

const std::vector<BlockKey> kKeys(2);
const std::vector<std::uint32_t> kBlocks{0, 1};

TEST_SUITE("a client without a server") {
  TEST_CASE("a session answers every question at once") {
    const auto session = CacheSession::start(nowhere()).value();
    CHECK(session->lookup(kKeys).error().code == Errc::kPeerLost);
    CHECK(session->claim(kKeys).error().code == Errc::kPeerLost);
    CHECK(session->reset_cache(seconds(1)).error().code == Errc::kPeerLost);
    CHECK(session->take(CacheSession::Ticket{1}).value().error().code == Errc::kGone);
    session->forget(CacheSession::Ticket{1});
    session->unclaim(Id128::random());
    CHECK_FALSE(session->wait_for(LinkState::kReady, Duration::zero()));
    CHECK(session->status().connections == 0);
  }

  TEST_CASE("a mover accepts no job, and its status has the reason") {
    testing::EngineMemory memory = testing::engine_memory(1, 64, 2);
    testing::SlowDevice device;
    Mover::Options options;
    options.link = nowhere();
    const auto mover = Mover::start(options, memory.layout(), device).value();

    CHECK(mover->save(Id128::random(), 1, kKeys, kBlocks, Device::Event::kNow).error().code ==
          Errc::kPeerLost);
    CHECK(mover->load(1, Id128::random(), 0, kBlocks).error().code == Errc::kPeerLost);
    mover->cancel_load(1);
    CHECK(mover->take_finished().empty());
    CHECK(mover->page_bytes() == std::vector<std::uint64_t>{64});

    mover->close();
    mover->close();
    CHECK(mover->status().state == LinkState::kRetired);
    CHECK(mover->load(1, Id128::random(), 0, kBlocks).error().code == Errc::kPeerLost);
  }

  TEST_CASE("invalid jobs are rejected before anything else") {
    testing::EngineMemory memory = testing::engine_memory(1, 64, 2);
    testing::SlowDevice device;
    Mover::Options options;
    options.link = nowhere();
    const auto mover = Mover::start(options, memory.layout(), device).value();
    const Id128 id = Id128::random();
    const auto code = [](const Result<void>& result) { return result.error().code; };

    CHECK(code(mover->save(id, 1, kKeys, {}, Device::Event::kNow)) == Errc::kInvalidArgument);
    CHECK(code(mover->save(id, 1, {}, {}, Device::Event::kNow)) == Errc::kInvalidArgument);
    CHECK(code(mover->save(id, 1, kKeys, std::vector<std::uint32_t>{0, 2}, Device::Event::kNow)) ==
          Errc::kInvalidArgument);
    CHECK(code(mover->load(1, id, 0, {})) == Errc::kInvalidArgument);
    CHECK(code(mover->load(1, id, 9000, kBlocks)) == Errc::kInvalidArgument);
    CHECK(code(mover->load(1, id, 0, std::vector<std::uint32_t>(9000))) == Errc::kInvalidArgument);
  }

  TEST_CASE("the error for an invalid option names it") {
    testing::EngineMemory memory = testing::engine_memory(1, 64, 2);
    testing::SlowDevice device;
    const auto detail = [](const auto& started) {
      REQUIRE_FALSE(started);
      CHECK(started.error().code == Errc::kInvalidArgument);
      return started.error().detail;
    };
    const auto link = [&](auto change) {
      LinkOptions options = nowhere();
      change(options);
      return detail(CacheSession::start(options));
    };
    using Options = LinkOptions;
    const auto has = [](const std::string& text, const char* word) {
      return text.find(word) != std::string::npos;
    };
    CHECK(has(link([](Options& o) { o.socket_path.clear(); }), "socket_path"));
    CHECK(has(link([](Options& o) { o.socket_path.assign(200, 'x'); }), "107"));
    CHECK(has(link([](Options& o) { o.instance.clear(); }), "instance"));
    CHECK(has(link([](Options& o) { o.lookup_deadline = {}; }), "lookup_deadline"));
    CHECK(has(link([](Options& o) { o.breaker_failures = 0; }), "breaker_failures"));
    CHECK(has(link([](Options& o) { o.minimum_version = 2; }), "minimum_version"));

    const auto mover = [&](auto change) {
      Mover::Options options;
      options.link = nowhere();
      change(options);
      return detail(Mover::start(options, memory.layout(), device));
    };
    CHECK(has(mover([](Mover::Options& o) { o.rank = 1; }), "rank"));
    CHECK(has(mover([](Mover::Options& o) { o.shard = 1; }), "shard"));
    CHECK(has(mover([](Mover::Options& o) { o.shards = 2; }), "shard"));
    CHECK(has(mover([](Mover::Options& o) { o.numa_node = -2; }), "NUMA"));
    CHECK(has(mover([](Mover::Options& o) { o.max_jobs = 0; }), "max_jobs"));
    CHECK(has(mover([](Mover::Options& o) { o.load_bytes_per_second = 0; }), "load_bytes"));
    CHECK(has(mover([](Mover::Options& o) { o.link.instance.clear(); }), "instance"));
  }

  TEST_CASE("in a child of fork() nothing hangs") {
    testing::EngineMemory memory = testing::engine_memory(1, 64, 2);
    testing::SlowDevice device;
    Mover::Options options;
    options.link = nowhere();
    auto mover = Mover::start(options, memory.layout(), device).value();
    auto session = CacheSession::start(nowhere()).value();
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      bool right = session->lookup(kKeys).error().code == Errc::kPeerLost;
      session->unclaim(Id128{1, 2});
      right = right && mover->load(1, Id128{1, 2}, 0, kBlocks).error().code == Errc::kPeerLost;
      mover->cancel_load(1);
      mover->close();
      session.reset();
      mover.reset();
      ::_exit(right ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
}

}  // namespace
}  // namespace pegaflow
