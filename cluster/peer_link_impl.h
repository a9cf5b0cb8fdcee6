#pragma once
/// \file
/// One connection of a link, from its dialing to its loss; for peer_link*.cpp only.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <kj/async-io.h>

#include "base/assert.h"
#include "capnp/wire/rpc_connection.h"
#include "capnp/wire/rpc_error.h"
#include "cluster/peer_link.h"

namespace pegaflow::cluster {

struct PeerLink::Connection final : private kj::TaskSet::ErrorHandler {
  explicit Connection(kj::Own<kj::AsyncIoStream> stream) : rpc(kj::mv(stream)), calls(*this) {}

  wire::PeerGate::Client gate() { return rpc.bootstrap<wire::PeerGate>(); }

  void taskFailed(kj::Exception&& exception) override {
    // Each call reports its failure to its caller.
    PEGA_ASSERT(false, "a call to a peer failed: {}", error_from(exception).detail);
  }

  RpcConnection rpc;
  std::optional<wire::Peer::Client> peer;
  std::string why_dropped;
  bool keeps_routes = false;                ///< The peer may live: its leases are still in use.
  std::vector<FabricDescriptor> described;  ///< The peer's lanes.
  std::vector<Route> routes;                ///< Those connected in the fabrics.
  std::size_t best_lane = 0;                ///< The best of the common lanes.
  std::optional<Route> last_resort;         ///< The route that needs no trial.
  std::uint64_t features = 0;               ///< The peer's.
  std::uint64_t sent = 0;  ///< Count of this node's changes of epochs that the peer has received.
  std::uint64_t seen = 0;  ///< Count of the peer's changes that were received from it.
  std::size_t waits = 0;   ///< Those of `calls` that wait for jobs,
  std::size_t opens = 0;   ///< and for blocks in the memory of the peer's workers.
  std::set<std::uint64_t> releasing;  ///< Leases whose release is not answered.
  OpenQuestions open;
  bool is_watched = false;  ///< A task waits for the end of a silence.
  kj::TaskSet calls;        ///< In flight, abandoned ones included.
};

}  // namespace pegaflow::cluster
