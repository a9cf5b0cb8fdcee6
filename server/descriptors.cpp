#include "server/descriptors.h"

#include <algorithm>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/log.h"
#include "base/os/unique_fd.h"
#include "cluster/found/found_peers.h"
#include "cluster/peers.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"server"};

/// A connection's socket, its pidfd twice with a keeper, and the pidfd of a detached one. The few
/// workers with direct memory have two more, within what is left to spare.
constexpr std::uint64_t kPerClient = 4;

/// For a node in one direction: its control connection and the sockets of its lane.
constexpr std::uint64_t kPerNode = 5;

/// Connections that a listed node may make: a restarted one has two for a moment.
constexpr std::uint64_t kOfListed = 2;
constexpr std::size_t kFromPeers = 4 * cluster::Peers::kMaxPeers;
/// With a directory any node of the cluster may dial this one.
constexpr std::size_t kFromNamed = 4 * kFromPeers;

/// Makes the kernel's table of this process large enough for many descriptors. Later, with threads,
/// each of its steps takes milliseconds.
void reserve_descriptors(std::uint64_t limit) {
  constexpr std::uint64_t kMost = 16384;
  const auto place = static_cast<int>(std::min(limit, kMost) - 1);
  const UniqueFd last(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, place));
}

}  // namespace

Connections connections_wanted(const ServerOptions& options) {
  Connections wanted{.clients = static_cast<std::size_t>(options.max_connections)};
  if (!options.peer_listen.empty()) {
    wanted.from_nodes = options.directory.empty() ? kFromPeers : kFromNamed;
  }
  return wanted;
}

std::uint64_t descriptors_for_dialed(const ServerOptions& options) {
  const std::size_t named =
      options.directory.empty() ? 0 : cluster::FoundPeers::Options{}.most_links;
  // A server of the directory has a socket, and an event for the lookup of its name.
  return (options.peers.size() + named) * kPerNode + 2 * options.directory.size();
}

Connections connections_within(const Connections& wanted, std::uint64_t limit, std::uint64_t own,
                               std::optional<std::size_t> listed) {
  const std::uint64_t usable = limit - std::min(limit, own);
  const auto fit = [](std::uint64_t descriptors, std::uint64_t each, std::size_t wanted_count) {
    const auto count = static_cast<std::size_t>(descriptors / each);
    return std::min(wanted_count, std::max<std::size_t>(1, count));
  };
  const std::uint64_t clients = wanted.clients * kPerClient;
  const std::uint64_t floor =
      listed ? std::min(usable / 2, kOfListed * *listed * kPerNode) : usable / 4;
  const std::uint64_t for_nodes = std::max(floor, usable - std::min(usable, clients));
  Connections found{.from_nodes = fit(for_nodes, kPerNode, wanted.from_nodes)};
  const std::uint64_t taken = std::min(usable, found.from_nodes * kPerNode);
  found.clients = fit(usable - taken, kPerClient, wanted.clients);
  return found;
}

Connections connections_that_fit(const ServerOptions& options) {
  const Connections wanted = connections_wanted(options);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  ::getrlimit(RLIMIT_NOFILE, &limit);
  reserve_descriptors(limit.rlim_cur);
  const std::optional<std::size_t> listed =
      options.directory.empty() ? std::optional(options.peers.size()) : std::nullopt;
  const Connections fit = connections_within(
      wanted, limit.rlim_cur, kOwnDescriptors + descriptors_for_dialed(options), listed);
  if (fit == wanted) return fit;
  kLog.warn(
      "fewer connections than configured: the limit of descriptors is low connections={} "
      "configured={} from_nodes={} of={} ulimit_n={}",
      fit.clients, wanted.clients, fit.from_nodes, wanted.from_nodes, limit.rlim_cur);
  return fit;
}

}  // namespace pegaflow::server
