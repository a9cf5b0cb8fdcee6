// The mistakes of one client cost other clients nothing.
#include <fstream>
#include <string>

#include <doctest/doctest.h>

#include "tests/support/server_process.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

constexpr std::uint64_t kPage = 4096;

Registration registration(const std::string& instance, std::uint64_t page_bytes,
                          const std::string& model = "m") {
  return {.instance = instance,
          .factors = {{"model", model}},
          .page_bytes = page_bytes,
          .block_count = 10};
}

/// An engine of one rank with three blocks, and its claim on them.
struct Engine {
  explicit Engine(kj::AsyncIoContext& io, const ServerProcess& server)
      : worker(io, server.socket()) {
    worker.hello();
    auto registered = worker.register_rank(registration("engine", kPage, "small"));
    REQUIRE(registered);
    REQUIRE(worker.save(*registered, {worker.process(), 1}, keys) == 3);
    const auto claimed = worker.claim(token, keys);
    REQUIRE(claimed);
    REQUIRE(claimed->blocks == 3);
  }

  WireClient worker;
  std::vector<BlockKey> keys = make_keys(1, 3);
  Id128 token = Id128::random();
};

/// Resident memory of a process.
std::uint64_t resident_bytes(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/statm");
  std::uint64_t size = 0;
  std::uint64_t resident = 0;
  file >> size >> resident;
  REQUIRE(file.good());
  return resident * 4096;
}

TEST_SUITE("a claim of another engine") {
  TEST_CASE("is not opened by a rank beyond its shards, and the server continues") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    Engine engine(io, server);
    WireClient last(io, server.socket());
    last.hello();
    Registration wide = registration("wide", kPage, "large");
    wide.ranks = wide.shards = 64;
    wide.rank = wide.shard = 63;
    REQUIRE(last.register_rank(wide));

    const auto opened = last.open(engine.token, 0, 3, 1);

    REQUIRE_FALSE(opened);
    CHECK(opened.error().code == Errc::kInvalidArgument);
    CHECK(engine.worker.open(engine.token, 0, 3, 1));
  }

  TEST_CASE("is not opened with pages of another size") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    Engine engine(io, server);
    WireClient large(io, server.socket());
    large.hello();
    REQUIRE(large.register_rank(registration("other", 256 * kPage, "large")));

    CHECK(large.open(engine.token, 0, 3, 1).error().code == Errc::kInvalidArgument);
    CHECK(engine.worker.open(engine.token, 0, 3, 1));
  }

  TEST_CASE("is not opened from another namespace with pages of the same size") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    Engine engine(io, server);
    WireClient equal(io, server.socket());
    equal.hello();
    REQUIRE(equal.register_rank(registration("other", kPage, "other weights")));

    CHECK(equal.open(engine.token, 0, 3, 1).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("is opened by an engine of the same namespace, and is gone after a reset") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    Engine engine(io, server);
    WireClient same(io, server.socket());
    same.hello();
    REQUIRE(same.register_rank(registration("other", kPage, "small")));

    CHECK(same.open(engine.token, 0, 3, 1));
    REQUIRE(same.reset_cache());
    CHECK(same.open(engine.token, 0, 3, 2).error().code == Errc::kGone);
  }
}

TEST_SUITE("a save of another engine") {
  TEST_CASE("is not published by a rank whose instance is incomplete, and the server continues") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient owner(io, server.socket());
    owner.hello();
    auto registered = owner.register_rank(registration("owner", kPage));
    REQUIRE(registered);
    const std::vector<BlockKey> keys = make_keys(1, 3);
    const JobId job{owner.process(), 1};
    REQUIRE(owner.reserve(job, keys, 0, 0));
    WireClient other(io, server.socket());
    other.hello();
    Registration half = registration("half", kPage);
    half.ranks = 2;  // The namespace is the owner's, and the other rank never comes.
    REQUIRE(other.register_rank(half));

    const auto published = other.publish(job);

    REQUIRE_FALSE(published);
    CHECK(published.error().code == Errc::kGone);
    CHECK(owner.publish(job));
    CHECK(owner.lookup(keys).blocks == 3);
  }
}

TEST_SUITE("a client that repeats itself") {
  TEST_CASE("20,000 registrations on one connection export one pool") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient worker(io, server.socket());
    worker.hello();
    REQUIRE(worker.register_rank("engine", kPage));
    std::vector<wire::Pool::Client> kept;  // The server cannot free what the client keeps.
    kept.reserve(20000);
    std::uint64_t before = 0;
    for (int i = 0; i < 20000; ++i) {
      if (i == 2000) before = resident_bytes(server.pid());
      auto request = worker.session().registerRequest();
      write_registration({.instance = "engine",
                          .factors = {{"dtype", "float16"}, {"weights", "a"}},
                          .page_bytes = kPage,
                          .block_count = 100},
                         request);
      auto answer = request.send().wait(io.waitScope);
      REQUIRE(answer.hasPool());
      kept.push_back(answer.getPool());
    }

    // One export for each registration took some 700 bytes: 12 MiB.
    const std::uint64_t after = resident_bytes(server.pid());
    INFO("resident before ", before, " after ", after);
    CHECK(after < before + (std::uint64_t{4} << 20));
  }
}

TEST_SUITE("pages of odd sizes") {
  TEST_CASE("the tables of a size are freed with its last engine if it left no block") {
    ServerProcess server({.pool_size = "256mb"});
    auto io = kj::setupAsyncIo();
    const double before = server.metric("pegaflow_memory_bytes");
    WireClient worker(io, server.socket());
    worker.hello();
    REQUIRE(worker.register_rank(registration("odd", kPage, "odd")));
    const double with_one = server.metric("pegaflow_memory_bytes");
    CHECK(with_one > before + (1 << 20));

    REQUIRE(worker.goodbye());

    CHECK(server.metric_becomes("pegaflow_memory_bytes", before));
  }

  TEST_CASE("the 257th and later ones are served after the former engines left") {
    ServerProcess server({.pool_size = "256mb"});
    auto io = kj::setupAsyncIo();
    for (std::uint64_t i = 1; i <= 600; ++i) {
      WireClient worker(io, server.socket());
      worker.hello();
      const std::string name = "odd-" + std::to_string(i);
      CAPTURE(name);
      auto pool = worker.register_rank(registration(name, i * 512, name));
      REQUIRE_MESSAGE(pool, to_string(pool.error()));
      // Each leaves a block behind: its size has an extent.
      REQUIRE(worker.save(*pool, {worker.process(), 1}, make_keys(i, 1)) == 1);
      REQUIRE(worker.goodbye());
    }
  }
}

}  // namespace
}  // namespace pegaflow::testing
