// An idle server sleeps.
#include <filesystem>
#include <fstream>
#include <list>
#include <string>

#include <poll.h>

#include <doctest/doctest.h>

#include "tests/support/server_process.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

/// The number of times that the threads of a process went to sleep by themselves: once for each
/// wake-up.
std::uint64_t sleeps_of(pid_t pid) {
  std::uint64_t sum = 0;
  const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      constexpr std::string_view kField = "voluntary_ctxt_switches:";
      if (line.starts_with(kField)) sum += std::stoull(line.substr(kField.size()));
    }
  }
  return sum;
}

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

    std::uint64_t wake_ups = 0;
    for (auto seconds = kHang; seconds.count() > 0; --seconds) {
      const std::uint64_t before = sleeps_of(server.pid());
      ::poll(nullptr, 0, 1000);  // The observed second: only its events are counted.
      wake_ups = sleeps_of(server.pid()) - before;
      if (wake_ups == 0) break;
    }

    CHECK(wake_ups == 0);
  }
}

}  // namespace
}  // namespace pegaflow::testing
