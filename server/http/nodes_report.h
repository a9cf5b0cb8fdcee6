#pragma once
/// \file
/// The report about other nodes, for /health and /metrics.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/id128.h"
#include "cluster/found/found_peers_stats.h"
#include "cluster/peer_stats.h"
#include "directory/stats.h"
#include "server/fetches/fetch_stats.h"
#include "server/rpc/rpc_counters.h"

namespace pegaflow::server {

/// The directory and the links to nodes that it named.
struct DirectoryReport {
  directory::Stats stats{};
  bool is_usable = false;
  std::uint64_t late = 0;            ///< Questions that were not answered in time.
  std::uint64_t withheld = 0;        ///< Questions that were not sent.
  std::uint64_t without_anchor = 0;  ///< Prompts too short for a question.
  cluster::FoundPeersStats links{};
};

/// The part of /health and /metrics about other nodes. A plain value.
struct NodesReport {
  struct Peer {
    std::string address;
    cluster::PeerStats link;
    double bytes_per_second = 0;      ///< The recent rate of reads from it; 0: unknown.
    double measured_ago_seconds = 0;  ///< Age of that rate.
    std::uint64_t queued_bytes = 0;   ///< Requested and not arrived.
  };
  Id128 node;                              ///< The incarnation of this node.
  std::vector<std::string> lanes;          ///< Open at this node, best first: "rdma", "tcp".
  std::vector<std::string> cards;          ///< Cards of the RDMA lane.
  std::vector<std::string> refused_cards;  ///< Unused cards, with the reason.
  std::string why_not_rdma;                ///< Empty: there is an RDMA lane.
  std::string ucx_version;                 ///< The RDMA lane's library; empty without the lane.
  std::string ucx_library;                 ///< Its file.
  std::string listen;                      ///< Where peers reach this node; empty: they cannot.
  std::vector<Peer> peers;
  FetchStats fetches;
  std::uint64_t staging_bytes = 0;  ///< Bytes of the pool; see Staging.
  cluster::PeerSourceStats source;
  cluster::PeerWaits waits;
  PeerGateCounters gate;
  RpcCounters rpc;  ///< Counters of connections from peers.
  /// The state of --peer-secret-file.
  struct Secrets {
    bool has_file = false;
    bool is_file_good = true;   ///< As of the last check.
    std::size_t accepted = 0;   ///< Secrets that a peer may prove.
    std::uint64_t changed = 0;  ///< Changes to other secrets.
    std::uint64_t rejected = 0;
  };
  Secrets secrets;
  std::optional<DirectoryReport> directory;
};

}  // namespace pegaflow::server
