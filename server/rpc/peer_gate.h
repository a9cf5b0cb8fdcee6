#pragma once
/// \file
/// The responder's side of peer.capnp: admits peers and serves their calls.

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include <kj/function.h>

#include "base/clock.h"
#include "base/id128.h"
#include "base/line_limit.h"
#include "cluster/epoch_watches.h"
#include "cluster/lanes.h"
#include "cluster/peer_link.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/rpc/rpc_server.h"

namespace pegaflow::server {

class PeerOffers;
class Staging;

/// The state that all connections of peers share; all of it outlives them.
struct PeerContext {
  CacheService& service;
  cluster::EpochWatches& watches;
  Background& background;
  cluster::Lanes& lanes;
  const cluster::OwnNode& own;
  const Clock& clock;          ///< The store's and the fabrics'.
  Staging* staging = nullptr;  ///< Null: this node has no disks.
  PeerOffers& offers;

  PeerGateCounters counters{};
  TimePoint lent_until{};  ///< End of the pool's loan on all lanes.
  LineLimit refused_lines{std::chrono::seconds(10)};
  std::vector<BlockKey> keys{};  ///< Scratch.

  /// A peer that entered, by its connection.
  struct Entered {
    Id128 node;          ///< The dialer's incarnation.
    std::string host;    ///< Its IP address.
    std::string listen;  ///< Its --peer-listen, as it reports; may be empty.
    std::string dialed;  ///< The address that it dialed; empty from older nodes.
    /// Its name in logs: the address where it listens, unless that is missing or a wildcard.
    [[nodiscard]] std::string name() const {
      const bool is_found =
          !listen.empty() && !listen.starts_with("0.0.0.0:") && !listen.starts_with("[::]:");
      return is_found ? listen : host;
    }
    /// Whether `newer` comes from the same link of the same node, which no longer uses this
    /// connection. One node may have several links to this one, by several names.
    [[nodiscard]] bool is_replaced_by(const Entered& newer) const {
      // A former process of that node does not count: behind one address translation or proxy two
      // nodes may have the same host and --peer-listen. The connection of a process that ended is
      // closed by its kernel, or by the keepalive probes.
      return !dialed.empty() && dialed == newer.dialed && node == newer.node;
    }
  };
  std::unordered_map<Id128, Entered> entered{};
  /// Ends a connection soon: RpcServer::end_later().
  std::function<void(const Id128& connection)> end_connection = [](const Id128&) {};
};

/// Longest lease of a peer: it reads within seconds, or not at all.
inline constexpr std::chrono::seconds kLongestPeerLease{10};
/// Longest wait of a peer for news of epochs.
inline constexpr std::chrono::seconds kLongestPeerWatch{10};
/// Longest wait of a peer for blocks that are pending.
inline constexpr std::chrono::seconds kLongestPeerPatience{1};

/// The service of an RpcServer for other nodes. `context` outlives it.
RpcServer::Service peer_service(PeerContext& context);

}  // namespace pegaflow::server
