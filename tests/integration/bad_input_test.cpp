// An invalid message costs its sender the connection, and no other client anything.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <list>
#include <random>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <capnp/message.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <doctest/doctest.h>

#include "tests/support/raw_connection.h"
#include "tests/support/seed.h"
#include "tests/support/server_process.h"
#include "tests/support/skip.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

/// A message's segment table that announces `words`, without any of them.
std::string announce(std::uint32_t words) {
  std::string table(8, '\0');
  std::memcpy(table.data() + 4, &words, 4);
  return table;
}

std::string to_bytes(capnp::MessageBuilder& message) {
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  return {reinterpret_cast<const char*>(bytes.begin()), bytes.size()};
}

/// The first message of every connection, with the number of its call.
std::string bootstrap(std::uint32_t question) {
  capnp::MallocMessageBuilder message;
  message.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(question);
  return to_bytes(message);
}

/// Sets the limit of descriptors of a running server; returns the former limit.
rlimit set_limit(const ServerProcess& server, const rlimit& limit) {
  rlimit before{};
  REQUIRE(::prlimit(server.pid(), RLIMIT_NOFILE, &limit, &before) == 0);
  return before;
}

/// The lowest number that a new descriptor of the server would get.
rlim_t lowest_free_descriptor(const ServerProcess& server) {
  rlim_t number = 0;
  const std::string open = fmt::format("/proc/{}/fd/", server.pid());
  while (std::filesystem::is_symlink(open + std::to_string(number))) ++number;
  return number;
}

/// Leaves the server no free descriptor; open ones stay. Returns the former limit.
rlimit leave_no_descriptor(const ServerProcess& server) {
  rlimit now{};
  REQUIRE(::prlimit(server.pid(), RLIMIT_NOFILE, nullptr, &now) == 0);
  return set_limit(server, {.rlim_cur = lowest_free_descriptor(server), .rlim_max = now.rlim_max});
}

/// A server with one engine that it must serve all the time.
struct Fixture {
  explicit Fixture(std::vector<std::string> arguments = {})
      : server({.arguments = std::move(arguments)}),
        io(kj::setupAsyncIo()),
        engine(io, server.socket()) {
    engine.hello();
    auto mapped = engine.register_rank("engine", 4096);
    REQUIRE(mapped);
    pool = std::move(*mapped);
    REQUIRE(engine.attach("engine"));
    REQUIRE(engine.save(pool, {Id128::random(), 1}, keys) == keys.size());
  }
  void check_engine_is_served() {
    CHECK(engine.lookup(keys).blocks == keys.size());
    CHECK(server.get("/health").status == 200);
  }

  ServerProcess server;
  kj::AsyncIoContext io;
  WireClient engine;
  MappedPool pool;
  std::vector<BlockKey> keys = make_keys(1, 20);
};

const char* const kProtocol = R"(pegaflow_connections_closed_total{reason="protocol"})";
const char* const kNoHello = R"(pegaflow_connections_closed_total{reason="no_hello"})";

TEST_SUITE("bad input") {
  TEST_CASE("garbage closes its connection") {
    Fixture f;
    std::mt19937_64 random(seed());
    for (int i = 0; i < 50; ++i) {
      RawConnection peer(f.server.socket());
      std::string garbage(512 + random() % 4096, '\0');
      for (char& byte : garbage) byte = static_cast<char>(random());
      peer.send(garbage);
      peer.finish();
      CHECK(peer.becomes_closed());
    }
    f.check_engine_is_served();
    CHECK(f.server.metric_becomes("pegaflow_connections", 1));
  }

  TEST_CASE("a message that is too large is rejected before memory is allocated for it") {
    Fixture f;
    const double before = f.server.metric(kProtocol);
    for (const std::uint32_t words : {std::uint32_t{1} << 20, std::uint32_t{1} << 28, ~0U}) {
      RawConnection peer(f.server.socket());
      peer.send(announce(words));
      CHECK(peer.becomes_closed());
    }
    // A segment table of half a million segments.
    RawConnection peer(f.server.socket());
    peer.send(std::string("\xff\xff\x07\x00\x00\x00\x00\x00", 8));
    CHECK(peer.becomes_closed());

    CHECK(f.server.metric(kProtocol) == before + 4);
    f.check_engine_is_served();
  }

  TEST_CASE("after hello a message may have 8 MiB") {
    Fixture f;
    WireClient client(f.io, f.server.socket());
    client.hello();
    auto request = client.session().attachRequest();
    request.initInstance(9 << 20);

    CHECK_THROWS_AS(request.send().wait(f.io.waitScope), kj::Exception);

    f.check_engine_is_served();
  }

  TEST_CASE("a truncated message is dropped with its connection") {
    Fixture f;
    const std::string whole = bootstrap(0);
    for (std::size_t length = 1; length < whole.size(); ++length) {
      RawConnection peer(f.server.socket());
      peer.send(whole.substr(0, length));
      peer.finish();
      CHECK(peer.becomes_closed());
    }
    f.check_engine_is_served();
    CHECK(f.server.metric_becomes("pegaflow_connections", 1));
  }

  TEST_CASE("a connection without a hello in time is closed, even if it sends bytes") {
    Fixture f(
        {"--hello-timeout", "2s"});  // The fixture's own engine must send its hello in time, too.
    RawConnection silent(f.server.socket());
    RawConnection slow(f.server.socket());
    slow.send(announce(100));
    RawConnection chatty(f.server.socket());  // Sends bytes, but never a hello.
    chatty.send(bootstrap(0));

    CHECK(silent.becomes_closed());
    CHECK(slow.becomes_closed());
    CHECK(chatty.becomes_closed());
    CHECK(f.server.metric(kNoHello) == 3);
    f.check_engine_is_served();
  }

  TEST_CASE("a slow message after hello delays no other client") {
    Fixture f;
    // Half of a message that will never end, on a connection of its own.
    RawConnection slow(f.server.socket());
    slow.send(bootstrap(0) + announce(1000) + std::string(16, '\0'));

    for (int i = 0; i < 100; ++i) CHECK(f.engine.lookup(f.keys).blocks == f.keys.size());
    f.check_engine_is_served();
  }

  TEST_CASE("calls whose results are never released are limited") {
    Fixture f;
    RawConnection peer(f.server.socket());
    std::string calls;
    for (std::uint32_t question = 0; question < 5000; ++question) calls += bootstrap(question);

    peer.send(calls);

    CHECK(peer.becomes_closed());
    CHECK(f.server.metric(kProtocol) == 1);
    CHECK(f.server.log().find("more than 4096 calls at once") != std::string::npos);
    f.check_engine_is_served();
  }

  TEST_CASE("a peer that sends requests and reads no response is closed before its queue grows") {
    Fixture f;
    RawConnection peer(f.server.socket());
    // Every result is released at once, so that only the queue grows.
    bool was_closed = false;
    for (std::uint32_t round = 0; round < 4000 && !was_closed; ++round) {
      std::string messages;
      for (std::uint32_t i = 0; i < 100; ++i) {
        const std::uint32_t question = i;
        messages += bootstrap(question);
        capnp::MallocMessageBuilder finish;
        finish.initRoot<capnp::rpc::Message>().initFinish().setQuestionId(question);
        messages += to_bytes(finish);
      }
      was_closed = !peer.send(messages);
    }

    CHECK(was_closed);
    CHECK(f.server.metric_becomes("pegaflow_connections", 1));
    CHECK(f.server.metric(kProtocol) == 1);
    CHECK(f.server.log().find("of answers wait to be read") != std::string::npos);
    f.check_engine_is_served();
  }

  TEST_CASE("valid messages with wrong contents are answered and change nothing") {
    Fixture f;
    std::mt19937_64 random(seed());
    // A real first exchange, with single bytes changed.
    capnp::MallocMessageBuilder message;
    auto call = message.initRoot<capnp::rpc::Message>().initCall();
    call.setQuestionId(1);
    call.initTarget().initPromisedAnswer().setQuestionId(0);
    call.setInterfaceId(capnp::typeId<wire::Gate>());
    call.setMethodId(0);
    auto hello = call.initParams().initContent().initAs<wire::Hello>();
    hello.setMinimum(1);
    hello.setMaximum(1);
    write_id(Id128::random(), hello.initProcess());
    hello.setBuild("a test");
    const std::string right = bootstrap(0) + to_bytes(message);
    for (int i = 0; i < 300; ++i) {
      std::string wrong = right;
      for (std::uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
        wrong[random() % wrong.size()] = static_cast<char>(random());
      }
      RawConnection peer(f.server.socket());
      peer.send(wrong);
      peer.finish();
      CHECK(peer.becomes_closed());
    }
    f.check_engine_is_served();
    CHECK(f.server.metric_becomes("pegaflow_connections", 1));
  }

  TEST_CASE("the fuzzer's corpus has conversations that a server answers to their end") {
    ServerProcess server;
    std::ifstream file(std::string(PEGA_FUZZ_CORPUS) + "/connection/whole_life", std::ios::binary);
    const std::string input{std::istreambuf_iterator<char>(file), {}};
    REQUIRE(input.size() > 1);
    const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    RawConnection peer(server.socket());

    peer.send(bootstrap(0));
    REQUIRE(peer.send_with_fd(input.substr(1), pidfd.get()));

    // Every call of the schema, each answered successfully; the last one shows that all are.
    const auto sample = [](std::string_view method) {
      return fmt::format(R"(pegaflow_rpc_requests_total{{method="{}",status="ok"}})", method);
    };
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (server.get("/metrics").body.find(sample("goodbye")) == std::string::npos) {
      REQUIRE(std::chrono::steady_clock::now() < end);
    }
    for (const char* const method :
         {"hello", "register", "attach", "reserve", "publish", "lookup", "claim", "open", "release",
          "unclaim", "reset_cache", "abandon", "goodbye"}) {
      CAPTURE(std::string(method));
      CHECK(server.get("/metrics").body.find(sample(method) + " 1") != std::string::npos);
    }
    CHECK(server.metric("pegaflow_cache_block_insertions_total") == 5);
    CHECK(server.metric(R"(pegaflow_load_blocks_total{written_by="this_process"})") == 5);
  }

  TEST_CASE("5,000 connections: the engine is served, and one more connection is accepted") {
    rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
    if (limit.rlim_cur < 5200) PEGA_SKIP("this process may not open 5,000 descriptors");
    Fixture f;
    std::list<RawConnection> crowd;
    for (int i = 0; i < 5000; ++i) crowd.emplace_back(f.server.socket());

    f.check_engine_is_served();
    CHECK(f.server.metric("pegaflow_connections") <= 1024);
    CHECK(f.server.metric_becomes("pegaflow_connections_accepted_total", 5001));
    WireClient another(f.io, f.server.socket());
    CHECK(another.hello().version == kWireMaximum);
    CHECK(another.attach("engine"));
    CHECK(another.lookup(f.keys).blocks == f.keys.size());

    crowd.clear();
    CHECK(f.server.metric_becomes("pegaflow_connections", 2));
  }

  TEST_CASE("connections after hello are not closed to admit others") {
    Fixture f({"--max-connections", "3"});
    WireClient second(f.io, f.server.socket());
    second.hello();
    WireClient third(f.io, f.server.socket());
    third.hello();

    RawConnection fourth(f.server.socket());

    CHECK(fourth.becomes_closed());
    CHECK(f.server.metric(R"(pegaflow_connections_refused_total{reason="limit"})") == 1);
    CHECK(second.attach("engine"));
    CHECK(third.attach("engine"));
    f.check_engine_is_served();
  }

  TEST_CASE(
      "with a low limit of descriptors fewer connections are allowed, and the log names the "
      "limit") {
    const ServerProcess server({.command_prefix = {"prlimit", "--nofile=400:400"}});
    CHECK(server.log().find("limit of descriptors is low") != std::string::npos);
    auto io = kj::setupAsyncIo();
    WireClient client(io, server.socket());
    CHECK(client.hello().version == kWireMaximum);
  }

  TEST_CASE("without a free descriptor connections are closed, and the server sleeps") {
    Fixture f;
    const rlimit before = leave_no_descriptor(f.server);
    constexpr int kCrowd = 5;
    for (int i = 0; i < kCrowd; ++i) {
      RawConnection refused(f.server.socket());
      CHECK(refused.becomes_closed());
    }
    // Each response is at least one event-loop iteration, and none of them accepts a connection.
    constexpr int kLookups = 500;
    for (int i = 0; i < kLookups; ++i) {
      REQUIRE(f.engine.lookup(f.keys).blocks == f.keys.size());
    }
    (void)set_limit(f.server, before);

    CHECK(f.server.metric(R"(pegaflow_connections_refused_total{reason="limit"})") == kCrowd);
    // Beside these: the fixture's, its saves, and the metrics. A busy loop has thousands.
    CHECK(f.server.metric("pegaflow_rpc_turn_seconds_count") < 2 * kLookups + 500);
    WireClient another(f.io, f.server.socket());
    CHECK(another.hello().version == kWireMaximum);
    f.check_engine_is_served();
  }
}

}  // namespace
}  // namespace pegaflow::testing
