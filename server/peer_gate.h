#pragma once
/// \file
/// peer.capnp on the side that answers: who may enter, and what they may ask.

#include <cstdint>
#include <vector>

#include <kj/function.h>

#include "base/clock.h"
#include "server/background.h"
#include "server/cache_service.h"
#include "server/lanes.h"
#include "server/peer_link.h"
#include "server/rpc_server.h"

namespace pegaflow {

/// What every connection of a peer needs; all of it outlives them.
struct PeerContext {
  CacheService& service;
  Background& background;
  Lanes& lanes;
  const OwnNode& own;
  const Clock& clock;  ///< The store's and the fabrics'.

  struct Counters {
    std::uint64_t greetings = 0;  ///< Peers that entered.
    std::uint64_t refused_version = 0;
    std::uint64_t refused_secret = 0;
    std::uint64_t locates = 0;
    std::uint64_t leases = 0;  ///< That lent something.
    std::uint64_t awaits = 0;  ///< Waits for jobs of engines here.
  };
  Counters counters{};
  TimePoint lent_until{};                        ///< The pool, on all lanes.
  std::optional<TimePoint> last_refused_line{};  ///< One line in a while is enough.
  std::vector<BlockKey> keys{};                  ///< Scratch.
};

/// Longest lease of a peer: it reads within seconds, or never.
inline constexpr std::chrono::seconds kLongestPeerLease{10};

/// What an RpcServer serves to other nodes. `context` outlives it.
RpcServer::Service peer_service(PeerContext& context);

}  // namespace pegaflow
