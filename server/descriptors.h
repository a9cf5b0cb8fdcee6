#pragma once
/// \file
/// The file descriptors that a server needs, and how many connections fit within the limit.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "server/options.h"

namespace pegaflow::server {

/// Descriptors beside those of connections: the pool, listeners, event loops, HTTP, files.
inline constexpr std::uint64_t kOwnDescriptors = 256;

/// The most connections of each sort. Whatever is accepted is counted here.
struct Connections {
  std::size_t clients = 0;
  std::size_t from_nodes = 0;  ///< Connections that other nodes make to this one.
  bool operator==(const Connections&) const = default;
};

/// Returns what the options ask for. Any node may dial one with --peer-listen: a node of a list is
/// dialed by at most 64 others, of which a restarted one may have several connections for a moment;
/// one in a directory by any of the cluster.
[[nodiscard]] Connections connections_wanted(const ServerOptions& options);

/// Descriptors of the connections that this node makes: to listed nodes, to nodes that a directory
/// names, and to the servers of the directory.
[[nodiscard]] std::uint64_t descriptors_for_dialed(const ServerOptions& options);

/// As many connections of what is wanted as fit into `limit` descriptors beside `own`. Other nodes
/// give way first: down to two connections of each of the `listed` nodes in --peers, but at most
/// half of the descriptors; or, without a value, where a directory names nodes, to a quarter. At
/// least one of each sort that is wanted.
[[nodiscard]] Connections connections_within(const Connections& wanted, std::uint64_t limit,
                                             std::uint64_t own, std::optional<std::size_t> listed);

/// Raises the limit of descriptors to the kernel's maximum, and returns what fits. What does not is
/// logged; such a connection is refused and counted.
[[nodiscard]] Connections connections_that_fit(const ServerOptions& options);

}  // namespace pegaflow::server
