#include "perf/server/loopback_nodes.h"

#include <chrono>
#include <thread>

#include <unistd.h>

#include <fmt/format.h>

namespace pegaflow::perf {

std::vector<std::string> loopback_addresses(std::size_t count) {
  const auto pid = static_cast<unsigned>(::getpid());
  std::vector<std::string> addresses;
  for (std::size_t i = 1; i <= count; ++i) {
    addresses.push_back(fmt::format("127.{}.{}.{}:30000", 1 + pid / 250 % 250, 1 + pid % 250, i));
  }
  return addresses;
}

Result<void> wait_until_ready(const harness::ServerProcess& server, const std::string& peer) {
  const std::string name = fmt::format("pegaflow_peer_ready{{peer=\"{}\"}}", peer);
  const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (;;) {
    PEGA_TRY_LET(const harness::ServerProcess::Metrics metrics, server.metrics());
    const auto found = metrics.find(name);
    if (found != metrics.end() && found->second == 1) return {};
    if (std::chrono::steady_clock::now() > last) {
      return fail(Errc::kTimeout, "a node did not connect to its peer {}", peer);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace pegaflow::perf
