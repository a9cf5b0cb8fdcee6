// A server with most of the memory, restarted repeatedly while clients still map its former pool.
#include <fstream>
#include <optional>
#include <string>

#include <doctest/doctest.h>

#include "base/units.h"
#include "engine/pool/memory_room.h"
#include "tests/support/server_process.h"
#include "tests/support/skip.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

using std::chrono::seconds;

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

std::uint64_t available_bytes() {
  const auto room = engine::memory_room();
  REQUIRE(room);
  return room->available_bytes;
}

/// All shared memory of this machine: pools are memfds. Unlike the free memory it does not change
/// with compilers and engines that run beside the test.
std::uint64_t shared_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    if (line.starts_with("Shmem:")) return std::stoull(line.substr(6)) * 1024;
  }
  FAIL("no Shmem in /proc/meminfo");
  return 0;
}

TEST_SUITE("restart") {
  TEST_CASE("10 restarts with 60 % of the free memory: no OOM, and memory stays flat") {
    const std::uint64_t free_before = available_bytes();
    const std::uint64_t shared_before = shared_bytes();
    if (free_before < 4 * kGiB) PEGA_SKIP("less than 4 GiB are free");
    const std::uint64_t size = free_before / 10 * 6;
    MESSAGE("pool of " << format_bytes(size));
    auto io = kj::setupAsyncIo();
    ServerProcess server({.pool_size = std::to_string(size), .wait_until_ready = false});
    server.wait_until_ready(seconds(180));
    const auto keys = make_keys(1, 100);
    int waited = 0;
    for (int round = 0; round < 10; ++round) {
      CAPTURE(round);
      std::optional<WireClient> client(std::in_place, io, server.socket());
      client->hello();
      auto pool = client->register_rank("engine", 1 << 20);
      REQUIRE(pool);
      CHECK(client->save(*pool, {Id128::random(), 1}, keys) == keys.size());

      if (round % 2 == 0) {
        server.kill();
      } else {
        // Unmapping takes 0.26 s of processor time for each GiB of 4 KiB pages, on a processor that
        // others use, too.
        CHECK(server.terminate(seconds(120)) == 0);
      }
      // The former pool is still mapped, so the new one does not fit, unless another process freed
      // much memory: then the server does not wait.
      const bool must_wait = available_bytes() < size;
      server.start(ServerProcess::Wait::kNo);
      const std::string address = server.wait_for_http_address();
      if (must_wait) {
        ServerProcess::Response health;
        do {
          health = http_request(address, "GET", "/health");
        } while (health.body.find("preparing the pool") != std::string::npos);
        CHECK(health.status == 503);
        CHECK(health.body.find("waiting for the memory of a previous server") != std::string::npos);
        ++waited;
      }

      // A client unmaps its pool when its connection ends.
      client.reset();
      *pool = MappedPool();
      server.wait_until_ready(seconds(180));
    }
    server.kill();
    MESSAGE("waited for the old pool in " << waited << " of 10 restarts");

    // Within the changes that other processes can cause meanwhile; one leaked pool is 10 times
    // that.
    const std::uint64_t shared_after = shared_bytes();
    INFO("shared memory before " << format_bytes(shared_before) << ", after "
                                 << format_bytes(shared_after));
    CHECK(shared_after < shared_before + size / 10);
  }
}

}  // namespace
}  // namespace pegaflow::testing
