// The lifetime of slots: lost connections, dead processes, PID namespaces.
#include <csignal>
#include <optional>
#include <string>

#include <doctest/doctest.h>

#include "tests/support/forked.h"
#include "tests/support/server_process.h"
#include "tests/support/skip.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

constexpr std::uint64_t kPage = 4096;
const char* const kReaderLost = R"(pegaflow_quarantine_slots{reason="reader_lost"})";
const char* const kWriterLost = R"(pegaflow_quarantine_slots{reason="writer_lost"})";

/// The scheduler and this process. The worker connects and disconnects.
struct Scheduler {
  explicit Scheduler(kj::AsyncIoContext& io, const ServerProcess& server)
      : client(io, server.socket()) {
    REQUIRE(client.hello().version == kWireMaximum);
    REQUIRE(client.attach("engine"));
  }
  WireClient client;
};

/// An engine that saved `keys`, opened the first four of them as pin 1, reserved `pending`, and
/// then hangs. Its claim is named `token`.
void hang_with_pins(const std::string& socket, const std::vector<BlockKey>& keys,
                    const std::vector<BlockKey>& pending, const Id128& token) {
  auto* const io = new kj::AsyncIoContext(kj::setupAsyncIo());  // Lives as long as the process.
  auto* const worker = new WireClient(*io, socket);
  worker->hello();
  auto pool = worker->register_rank("engine", kPage);
  if (!pool) throw std::runtime_error(pool.error().detail);
  if (!worker->save(*pool, {Id128::random(), 1}, keys)) throw std::runtime_error("save");
  if (!worker->attach("engine")) throw std::runtime_error("attach");
  if (!worker->claim(token, keys)) throw std::runtime_error("claim");
  if (!worker->open(token, 0, 4, 1)) throw std::runtime_error("open");
  if (!worker->reserve({Id128::random(), 2}, pending)) throw std::runtime_error("reserve");
}

/// All frames that the engine held are returned, and its sealed blocks are still found.
void check_all_came_back(const ServerProcess& server, Scheduler& scheduler,
                         const std::vector<BlockKey>& keys, kj::AsyncIoContext& io) {
  CHECK(server.metric_becomes(kReaderLost, 0));
  CHECK(server.metric_becomes(kWriterLost, 0));
  CHECK(server.metric_becomes("pegaflow_pins", 0));
  CHECK(server.metric_becomes("pegaflow_claims", 0));
  CHECK(server.metric_becomes("pegaflow_parted_connections", 0));
  CHECK(server.metric_becomes(R"(pegaflow_pool_slots{state="quarantined"})", 0));
  WireClient heir(io, server.socket());
  heir.hello();
  REQUIRE(heir.register_rank("engine", kPage));
  CHECK(scheduler.client.lookup(keys).blocks == keys.size());
}

TEST_SUITE("lifetime") {
  TEST_CASE("a killed engine's pins and reservations are returned, its sealed blocks stay") {
    ServerProcess server;
    const auto keys = make_keys(1, 10);
    const auto pending = make_keys(2, 3);
    Forked engine([&] { hang_with_pins(server.socket(), keys, pending, Id128::random()); });
    auto io = kj::setupAsyncIo();
    Scheduler scheduler(io, server);
    CHECK(server.metric("pegaflow_pins") == 1);
    CHECK(server.metric("pegaflow_reservations") == 1);

    engine.kill();

    check_all_came_back(server, scheduler, keys, io);
    CHECK(scheduler.client.lookup(pending).blocks == 0);
  }

  TEST_CASE("a stopped engine keeps its pins until it dies") {
    ServerProcess server;
    const auto keys = make_keys(1, 10);
    Forked engine([&] { hang_with_pins(server.socket(), keys, make_keys(2, 3), Id128::random()); });
    auto io = kj::setupAsyncIo();
    Scheduler scheduler(io, server);
    engine.signal(SIGSTOP);

    CHECK(scheduler.client.lookup(keys).blocks == 10);
    CHECK(server.metric("pegaflow_pins") == 1);

    engine.kill();
    check_all_came_back(server, scheduler, keys, io);
  }

  TEST_CASE("a lost connection releases nothing while its process lives") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    Scheduler scheduler(io, server);
    const auto keys = make_keys(1, 10);
    const auto pending = make_keys(2, 3);
    const Id128 token = Id128::random();
    const Id128 process = Id128::random();
    Id128 connection;
    {
      WireClient worker(io, server.socket());
      connection = worker.hello({.process = process}).connection;
      const auto pool = worker.register_rank("engine", kPage);
      REQUIRE(pool);
      REQUIRE(worker.save(*pool, {Id128::random(), 1}, keys) == 10);
      REQUIRE(scheduler.client.claim(token, keys));
      REQUIRE(worker.open(token, 0, 4, 1));
      REQUIRE(worker.reserve({Id128::random(), 2}, pending));
    }

    REQUIRE(server.metric_becomes(kReaderLost, 4));
    CHECK(server.metric_becomes(kWriterLost, 3));
    CHECK(server.metric("pegaflow_parted_connections") == 1);
    CHECK(server.metric("pegaflow_pins") == 1);
    CHECK(server.metric("pegaflow_oldest_pin_seconds") > 0);

    SUBCASE("until its client reports that it is quiet") {
      WireClient again(io, server.socket());
      const auto greeting =
          again.hello({.process = process, .previous_connection = connection, .quiesced = true});
      CHECK(greeting.version == kWireMaximum);
      REQUIRE(again.register_rank("engine", kPage));
      CHECK(server.metric_becomes(kReaderLost, 0));
      CHECK(server.metric_becomes(kWriterLost, 0));
      CHECK(server.metric("pegaflow_parted_connections") == 0);
      CHECK(scheduler.client.lookup(keys).blocks == 10);
    }
    SUBCASE("a new connection without quiet releases nothing") {
      WireClient again(io, server.socket());
      again.hello({.process = process, .previous_connection = connection, .quiesced = false});
      REQUIRE(again.register_rank("engine", kPage));
      CHECK(server.metric(kReaderLost) == 4);
      CHECK(server.metric(kWriterLost) == 3);
      // Its blocks stay findable, and the pending ones may be saved again, in other slots.
      CHECK(scheduler.client.lookup(keys).blocks == 10);
      const auto slots = again.reserve({Id128::random(), 3}, pending);
      REQUIRE(slots);
      for (const std::uint32_t slot : *slots) CHECK(slot != ~std::uint32_t{0});
    }
    SUBCASE("another process cannot report it") {
      WireClient other(io, server.socket());
      const auto greeting = other.hello({.previous_connection = connection, .quiesced = true});
      REQUIRE(greeting.refused);
      CHECK(greeting.refused->code == Errc::kInvalidArgument);
      CHECK(server.metric(kReaderLost) == 4);
    }
  }

  TEST_CASE("a quiet hello ends the former connection, whose end the server has not seen") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient worker(io, server.socket());
    const auto greeting = worker.hello();
    const auto pool = worker.register_rank("engine", kPage);
    REQUIRE(pool);
    REQUIRE(worker.reserve({Id128::random(), 1}, make_keys(1, 5)));

    WireClient again(io, server.socket());
    again.hello({.process = worker.process(),
                 .previous_connection = greeting.connection,
                 .quiesced = true});

    CHECK(server.metric("pegaflow_connections") == 1);
    CHECK(server.metric("pegaflow_reservations") == 0);
    CHECK(server.metric_becomes("pegaflow_pool_used_bytes", 0));
    CHECK(again.register_rank("engine", kPage));
  }

  TEST_CASE("a connection that holds nothing leaves nothing behind") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    for (int i = 0; i < 50; ++i) {
      WireClient worker(io, server.socket());
      worker.hello();
      REQUIRE(worker.register_rank("engine " + std::to_string(i), kPage));
    }

    CHECK(server.metric_becomes("pegaflow_connections", 0));
    CHECK(server.metric("pegaflow_parted_connections") == 0);
    CHECK(server.metric("pegaflow_instances") == 0);
  }

  TEST_CASE("claims end with the scheduler's connection, pins do not") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient worker(io, server.socket());
    worker.hello();
    const auto pool = worker.register_rank("engine", kPage);
    REQUIRE(pool);
    const auto keys = make_keys(1, 10);
    REQUIRE(worker.save(*pool, {Id128::random(), 1}, keys) == 10);
    {
      Scheduler scheduler(io, server);
      const Id128 token = Id128::random();
      REQUIRE(scheduler.client.claim(token, keys));
      REQUIRE(worker.open(token, 0, 10, 1));
    }

    CHECK(server.metric_becomes("pegaflow_claims", 0));
    CHECK(server.metric("pegaflow_pins") == 1);
    CHECK(server.metric("pegaflow_parted_connections") == 0);
    CHECK(worker.release(1));
    CHECK(server.metric("pegaflow_pins") == 0);
  }

  TEST_CASE("an engine in a PID namespace of its own is detected as gone when it is killed") {
    if (!may_make_pid_namespaces()) PEGA_SKIP("this process may not make PID namespaces");
    ServerProcess server;
    const auto keys = make_keys(1, 10);
    Forked engine([&] { hang_with_pins(server.socket(), keys, make_keys(2, 3), Id128::random()); },
                  {.new_pid_namespace = true});
    auto io = kj::setupAsyncIo();
    Scheduler scheduler(io, server);
    REQUIRE(server.metric("pegaflow_pins") == 1);

    engine.kill();

    check_all_came_back(server, scheduler, keys, io);
  }

  TEST_CASE("engine and server in two sibling PID namespaces, as in two containers") {
    if (!may_make_pid_namespaces()) PEGA_SKIP("this process may not make PID namespaces");
    ServerProcess server({.command_prefix = {"unshare", "--pid", "--fork", "--kill-child"}});
    const auto keys = make_keys(1, 10);
    Forked engine([&] { hang_with_pins(server.socket(), keys, make_keys(2, 3), Id128::random()); },
                  {.new_pid_namespace = true});
    auto io = kj::setupAsyncIo();
    Scheduler scheduler(io, server);
    REQUIRE(server.metric("pegaflow_pins") == 1);

    engine.kill();

    check_all_came_back(server, scheduler, keys, io);
  }
}

}  // namespace
}  // namespace pegaflow::testing
