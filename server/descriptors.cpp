#include "server/descriptors.h"

#include <algorithm>

#include <sys/resource.h>

#include "base/log.h"
#include "cluster/peers.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"server"};

/// A connection's socket, its pidfd twice with a keeper, and the pidfd of a detached one.
constexpr std::uint64_t kDescriptorsPerConnection = 4;

/// For a peer in one direction: its control connection and the sockets of its lane.
constexpr std::uint64_t kDescriptorsPerPeer = 5;

}  // namespace

std::uint64_t descriptors_for_peers(const ServerOptions& options) {
  const std::uint64_t dialed = options.peers.size();
  const std::uint64_t dialing = options.peer_listen.empty() ? 0
                                : dialed == 0               ? cluster::Peers::kMaxPeers
                                                            : dialed;
  return (dialed + dialing) * kDescriptorsPerPeer;
}

std::size_t connections_that_fit(std::size_t wanted, std::uint64_t own) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const std::uint64_t usable = limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, own);
  const std::size_t fit = std::max<std::size_t>(1, usable / kDescriptorsPerConnection);
  if (fit >= wanted) return wanted;
  kLog.warn(
      "fewer connections than configured: the limit of descriptors is low connections={} "
      "configured={} ulimit_n={}",
      fit, wanted, limit.rlim_cur);
  return fit;
}

}  // namespace pegaflow::server
