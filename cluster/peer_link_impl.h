#pragma once
/// \file
/// For peer_link*.cpp alone: one connection of a link, from its dialing to its loss.

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <capnp/message.h>
#include <capnp/rpc-twoparty.h>

#include "base/assert.h"
#include "capnp/wire/rpc_error.h"
#include "cluster/peer_link.h"

namespace pegaflow::cluster {

/// The largest answer, a lease, has some 800 KiB; a broken peer is not to make us read more.
inline constexpr std::uint64_t kTraversalLimitWords = 1 << 20;

struct PeerLink::Connection final : private kj::TaskSet::ErrorHandler {
  explicit Connection(kj::Own<kj::AsyncIoStream> connected)
      : stream(kj::mv(connected)),
        network(*stream, capnp::rpc::twoparty::Side::CLIENT, reader_options()),
        rpc(capnp::makeRpcClient(network)),
        dropped(kj::newPromiseAndFulfiller<void>()),
        over(network.onDisconnect().exclusiveJoin(kj::mv(dropped.promise)).fork()),
        calls(*this) {}

  static capnp::ReaderOptions reader_options() {
    capnp::ReaderOptions options;
    options.traversalLimitInWords = kTraversalLimitWords;
    return options;
  }

  wire::PeerGate::Client gate() {
    capnp::MallocMessageBuilder message;
    auto server = message.initRoot<capnp::rpc::twoparty::VatId>();
    server.setSide(capnp::rpc::twoparty::Side::SERVER);
    return rpc.bootstrap(server).castAs<wire::PeerGate>();
  }

  void taskFailed(kj::Exception&& exception) override {
    // Each call reports its failure to its caller.
    PEGA_ASSERT(false, "a call to a peer failed: {}", error_from(exception).detail);
  }

  kj::Own<kj::AsyncIoStream> stream;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc;
  std::optional<wire::Peer::Client> peer;
  kj::PromiseFulfillerPair<void> dropped;
  std::string why_dropped;
  bool keeps_routes = false;  ///< The peer may live: its leases are still in use.
  kj::ForkedPromise<void> over;
  std::vector<FabricDescriptor> described;  ///< The peer's lanes.
  std::vector<Route> routes;                ///< That the fabrics know of.
  std::size_t best_lane = 0;                ///< Of those that both have.
  std::optional<Route> last_resort;         ///< What needs no trial.
  std::uint64_t features = 0;               ///< Of the peer.
  std::uint64_t sent = 0;                   ///< Changes of our epochs that the peer has.
  std::uint64_t seen = 0;                   ///< Changes of the peer's epochs that we have.
  std::size_t waits = 0;                    ///< Of `calls`: for jobs.
  std::set<std::uint64_t> releasing;        ///< Leases whose release is not answered.
  OpenQuestions open;
  bool is_watched = false;  ///< A task waits for the end of a silence.
  kj::TaskSet calls;        ///< In flight, abandoned ones included.
};

}  // namespace pegaflow::cluster
