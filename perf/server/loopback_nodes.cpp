#include "perf/server/loopback_nodes.h"

#include <chrono>

#include <unistd.h>

#include <fmt/format.h>

#include "perf/lib/wait_until.h"

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
  return wait_until(
      fmt::format("connected to the peer {}", peer),
      [&]() -> Result<bool> {
        PEGA_TRY_LET(const harness::ServerProcess::Metrics metrics, server.metrics());
        const auto found = metrics.find(name);
        return found != metrics.end() && found->second == 1;
      },
      std::chrono::seconds(30));
}

}  // namespace pegaflow::perf
