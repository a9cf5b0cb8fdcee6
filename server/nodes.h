#pragma once
/// \file
/// All that has to do with other nodes, put together: the lane, the peers, and what is fetched.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <kj/async-io.h>

#include "base/mailbox.h"
#include "engine/pool.h"
#include "server/boot_clock.h"
#include "server/fetches.h"
#include "server/listener.h"
#include "server/options.h"
#include "server/peer_gate.h"
#include "server/peers.h"
#include "server/rpc_server.h"
#include "transport/fabric.h"

namespace pegaflow {

/// What /health and /metrics say of other nodes. A plain value.
struct NodesReport {
  struct Peer {
    std::string address;
    PeerLink::Stats link;
  };
  Id128 node;          ///< Our incarnation.
  std::string lane;    ///< "tcp".
  std::string listen;  ///< Where peers reach us; empty: nowhere.
  std::vector<Peer> peers;
  Fetches::Stats fetches;
  Peers::Waits waits;
  PeerContext::Counters gate;
  RpcCounters rpc;  ///< Of connections that peers made.
};

/// This node among others.
///
/// Without --peers and --peer-listen there is none of it: no thread, no socket, no timer. The whole
/// pool is one region of the fabric, lent while a lease runs. Thread-bound: the RPC thread; the
/// fabric's thread only puts completions into a mailbox.
class Nodes {
 public:
  /// What the options mean, checked and bound before anything else starts.
  struct Plan {
    OwnNode own;
    Peers::Options peers;
    std::optional<TcpListener> listener;
    std::string fabric_listen;
    Fetches::Options fetches;
  };
  /// No value when no other node was named and nobody is to reach us.
  /// Errors: kInvalidArgument for options that contradict each other or make no sense; kRefused for
  /// --require-rdma, which nothing here can keep yet, a secret that cannot be read, or an address
  /// that is taken.
  static Result<std::optional<Plan>> plan(const ServerOptions& options, const std::string& build);

  /// Registers the pool, listens and dials. All outlive it; `changed` is called when the state of a
  /// peer has.
  /// Errors: those of the fabric.
  static Result<std::unique_ptr<Nodes>> start(kj::AsyncIoContext& io, Plan plan, Pool& pool,
                                              CacheService& service, Background& background,
                                              const Clock& clock,
                                              const std::function<void()>& changed);
  ~Nodes() noexcept(false);
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;

  [[nodiscard]] const Id128& node() const noexcept { return plan_.own.node; }
  [[nodiscard]] Peers& peers() noexcept { return *peers_; }
  [[nodiscard]] Fetches& fetches() noexcept { return *fetches_; }
  /// Of batches: read them, in a turn of the loop, when the mailbox has something.
  [[nodiscard]] Mailbox<Fabric::Completion>& completions() noexcept { return completions_; }
  void read_completions();
  [[nodiscard]] NodesReport report() const;

 private:
  Nodes(kj::AsyncIoContext& io, Plan plan);

  Plan plan_;
  BootClock boot_;
  Mailbox<Fabric::Completion> completions_;
  std::unique_ptr<Fabric> fabric_;
  std::string lane_;
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<Fetches> fetches_;
  std::unique_ptr<PeerContext> context_;
  RpcCounters rpc_counters_;
  std::unique_ptr<RpcServer> rpc_;
  kj::AsyncIoContext& io_;
};

}  // namespace pegaflow
