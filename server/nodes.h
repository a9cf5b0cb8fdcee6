#pragma once
/// \file
/// All that has to do with other nodes, put together: the lanes, the peers, and what is fetched.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <kj/async-io.h>

#include "base/os/watched_file.h"
#include "cluster/boot_clock.h"
#include "cluster/epoch_watches.h"
#include "cluster/lanes.h"
#include "cluster/peers.h"
#include "engine/pool/pool.h"
#include "server/cache/fetches.h"
#include "server/options.h"
#include "server/rpc/listener.h"
#include "server/rpc/peer_gate.h"
#include "server/rpc/rpc_server.h"

namespace pegaflow::server {

/// What /health and /metrics say of other nodes. A plain value.
struct NodesReport {
  struct Peer {
    std::string address;
    cluster::PeerLink::Stats link;
    double bytes_per_second = 0;     ///< At which it is read from, lately; 0: not known.
    std::uint64_t queued_bytes = 0;  ///< That were asked for and have not arrived.
  };
  Id128 node;                              ///< Our incarnation.
  std::vector<std::string> lanes;          ///< That are open here, best first: "rdma", "tcp".
  std::vector<std::string> cards;          ///< Of the lane over RDMA.
  std::vector<std::string> refused_cards;  ///< And why.
  std::string why_not_rdma;                ///< Empty: it is there.
  std::string listen;                      ///< Where peers reach us; empty: nowhere.
  std::vector<Peer> peers;
  Fetches::Stats fetches;
  cluster::Peers::Waits waits;
  PeerContext::Counters gate;
  RpcCounters rpc;  ///< Of connections that peers made.
  /// Of --peer-secret-file.
  struct Secrets {
    bool has_file = false;
    bool is_file_good = true;   ///< It was when it was last looked at.
    std::size_t accepted = 0;   ///< Secrets of which a peer may prove either.
    std::uint64_t changed = 0;  ///< Times that other secrets were read.
    std::uint64_t rejected = 0;
  };
  Secrets secrets;
};

/// This node among others.
///
/// Without --peers and --peer-listen there is none of it: no thread, no socket, no timer. The whole
/// pool is one region of each lane, lent while a lease runs. Thread-bound: the RPC thread.
class Nodes {
 public:
  /// What the options mean, checked and bound before anything else starts.
  struct Plan {
    cluster::OwnNode own;
    cluster::Peers::Options peers;
    std::optional<TcpListener> listener;
    cluster::Lanes::Plan lanes;
    Fetches::Options fetches;
    std::string secret_file;                 ///< Empty: there is none.
    std::optional<WatchedFile> secret_at{};  ///< As it was before it was read.
  };
  /// No value when no other node was named and nobody is to reach us.
  /// Called before there are other threads: it may load UCX, which reads the environment.
  /// Errors: kInvalidArgument for options that contradict each other or make no sense; kRefused for
  /// --require-rdma where there is no RDMA, a secret that cannot be read, or an address that is
  /// taken.
  static Result<std::optional<Plan>> plan(const ServerOptions& options, const std::string& build);

  /// Registers the pool, listens and dials. All outlive it; `changed` is called when the state of a
  /// peer has.
  /// Errors: those of the lanes.
  static Result<std::unique_ptr<Nodes>> start(kj::AsyncIoContext& io, Plan plan, engine::Pool& pool,
                                              CacheService& service, Background& background,
                                              const Clock& clock,
                                              const std::function<void()>& changed);
  ~Nodes() noexcept(false);
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;

  [[nodiscard]] const Id128& node() const noexcept { return plan_.own.node; }
  [[nodiscard]] cluster::Peers& peers() noexcept { return *peers_; }
  [[nodiscard]] Fetches& fetches() noexcept { return *fetches_; }
  [[nodiscard]] cluster::EpochWatches& watches() noexcept { return *watches_; }
  /// Of batches: read them, in a turn of the loop, when the mailbox has something.
  [[nodiscard]] Mailbox<Fabric::Completion>& completions() noexcept {
    return lanes_->completions();
  }
  void read_completions();
  [[nodiscard]] NodesReport report() const;

 private:
  Nodes(kj::AsyncIoContext& io, Plan plan);
  kj::Promise<void> watch_secrets();
  void read_secrets();

  Plan plan_;
  cluster::BootClock boot_;
  std::unique_ptr<cluster::Lanes> lanes_;
  std::unique_ptr<cluster::Peers> peers_;
  std::unique_ptr<Fetches> fetches_;
  std::unique_ptr<cluster::EpochWatches> watches_;
  std::unique_ptr<PeerContext> context_;
  RpcCounters rpc_counters_;
  std::unique_ptr<RpcServer> rpc_;
  kj::AsyncIoContext& io_;
  NodesReport::Secrets secrets_;
  kj::Promise<void> watching_ = nullptr;  ///< The secret file.
};

}  // namespace pegaflow::server
