// An idle server sleeps.
#include <list>
#include <string>

#include <doctest/doctest.h>

#include "tests/support/server_process.h"
#include "tests/support/wake_ups.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

TEST_SUITE("idle") {
  TEST_CASE("with 8 connected idle clients there is a second in which no thread wakes") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    std::list<WireClient> clients;
    for (int i = 0; i < 8; ++i) {
      WireClient& client = clients.emplace_back(io, server.socket());
      client.hello();
      const std::string name = "engine " + std::to_string(i / 2);
      if (i % 2 != 0) {
        REQUIRE(client.attach(name));
        continue;
      }
      const auto pool = client.register_rank(name, 4096);
      REQUIRE(pool);
      REQUIRE(client.save(*pool, {Id128::random(), 1}, make_keys(i, 50)));
    }
    // The last response has arrived, so only periodic work is left, and the way into sleep, which
    // may take a while on a busy machine. A timer would fire in every second.

    CHECK(wake_ups_in_a_second(server.pid()) == 0);
  }
}

}  // namespace
}  // namespace pegaflow::testing
