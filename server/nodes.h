#pragma once
/// \file
/// Everything that concerns other nodes, assembled: the lanes, the peers and the fetches.

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
#include "cluster/found/found_peers.h"
#include "cluster/lanes.h"
#include "cluster/peer_source.h"
#include "cluster/peers.h"
#include "engine/pool/pool.h"
#include "server/directory_link.h"
#include "server/fetches/fetches.h"
#include "server/http/nodes_report.h"
#include "server/options.h"
#include "server/rpc/listener.h"
#include "server/rpc/peer_gate.h"
#include "server/rpc/rpc_server.h"

namespace pegaflow::server {

class DirectReads;
class PeerOffers;
class SsdSource;
class Staging;
class TieredSource;

/// The connections of this node to the other nodes of its cluster.
///
/// Without --peers and --peer-listen it does not exist, with no thread, no socket and no timer. The
/// whole pool is one region of each lane, lent while a lease runs. Thread-bound: the RPC thread.
class Nodes {
 public:
  /// The options, validated and with their sockets bound, before anything else starts.
  struct Plan {
    cluster::OwnNode own;
    cluster::Peers::Options peers;
    std::optional<TcpListener> listener;
    cluster::Lanes::Plan lanes;
    cluster::PeerSource::Options source;
    Fetches::Options fetches;
    std::string secret_file;                 ///< Empty: none.
    std::optional<WatchedFile> secret_at{};  ///< Its state before it was read.
    std::optional<DirectoryLink::Plan> directory{};
    std::size_t most_connections = 256;  ///< From other nodes; see connections_that_fit().
  };
  /// No value when the options name no other node and no address to listen at. To be called before
  /// other threads start: it may load UCX, which reads the environment.
  /// Errors: kInvalidArgument for options that contradict each other or make no sense; kRefused for
  /// --require-rdma where there is no RDMA, a secret that cannot be read, or an address that is
  /// taken.
  static Result<std::optional<Plan>> plan(const ServerOptions& options, const std::string& build);

  /// Registers the pool, listens and dials. All arguments outlive the result. `disks` is
  /// searched before other nodes; null: there are none. `changed` is called after the state of a
  /// peer has changed. Errors: those of the lanes.
  static Result<std::unique_ptr<Nodes>> start(kj::AsyncIoContext& io, Plan plan, engine::Pool& pool,
                                              CacheService& service, Background& background,
                                              const Clock& clock, SsdSource* disks,
                                              DirectReads& direct,
                                              const std::function<void()>& changed);
  ~Nodes() noexcept(false);
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;

  [[nodiscard]] const Id128& node() const noexcept { return plan_.own.node; }
  [[nodiscard]] cluster::Peers& peers() noexcept { return *peers_; }
  [[nodiscard]] Fetches& fetches() noexcept { return *fetches_; }
  [[nodiscard]] cluster::EpochWatches& watches() noexcept { return *watches_; }
  /// Completions of batches. Once the mailbox is readable, call read_completions() in an event-loop
  /// iteration.
  [[nodiscard]] Mailbox<Fabric::Completion>& completions() noexcept {
    return lanes_->completions();
  }
  void read_completions();
  /// Whether the epochs of the directory, if there is one, are known here.
  [[nodiscard]] bool knows_directory_epochs() const {
    return directory_ == nullptr || directory_->knows_epochs();
  }
  [[nodiscard]] NodesReport report() const;

 private:
  Nodes(kj::AsyncIoContext& io, Plan plan, const Clock& clock);
  void listen();
  Result<void> start_directory(CacheService& service, const std::function<void()>& changed);
  void start_watch_of_secrets();
  kj::Promise<void> watch_secrets();
  void read_secrets();

  Plan plan_;
  const Clock& clock_;
  cluster::BootClock boot_;
  std::unique_ptr<cluster::Lanes> lanes_;
  std::unique_ptr<cluster::Peers> peers_;
  std::unique_ptr<DirectoryLink> directory_;    ///< Null without --directory.
  std::unique_ptr<cluster::FoundPeers> found_;  ///< The same.
  std::unique_ptr<cluster::PeerSource> source_;
  std::unique_ptr<TieredSource> tiers_;  ///< Null without disks.
  std::unique_ptr<Fetches> fetches_;
  std::unique_ptr<Staging> staging_;  ///< Null without disks.
  std::unique_ptr<cluster::EpochWatches> watches_;
  std::unique_ptr<PeerOffers> offers_;
  std::unique_ptr<PeerContext> context_;
  RpcCounters rpc_counters_;
  std::unique_ptr<RpcServer> rpc_;
  kj::AsyncIoContext& io_;
  NodesReport::Secrets secrets_;
  kj::Promise<void> watching_ = nullptr;  ///< Watches the secret file.
};

}  // namespace pegaflow::server
