#pragma once
/// \file
/// The messages between the RPC thread and the HTTP thread: questions, and plain answers.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/pool/placement.h"
#include "server/cache/instance_report.h"
#include "server/http/router_messages.h"
#include "server/http/snapshot.h"

namespace pegaflow::server {

/// The result of POST /cache/memory/cleanup.
struct CleanupReport {
  std::uint64_t evicted_blocks = 0;
  std::uint64_t evicted_bytes = 0;
  std::uint64_t still_referenced_blocks = 0;
};

/// The result of POST /cache/ssd/cleanup.
struct SsdCleanupReport {
  bool has_disks = false;
  bool is_durable = false;  ///< On every disk: nothing comes back after a power cut.
  std::uint64_t dropped_blocks = 0;
};

/// The answer of the test switch that damages a block.
struct OverwriteReport {
  bool found = false;
  std::uint64_t slot = 0;  ///< Where it begins in the pool / 4 KiB.
  std::uint64_t bytes = 0;
};

/// From the HTTP thread to the RPC thread.
struct AdminQuestion {
  enum class Kind : std::uint8_t {
    kMetrics,
    kInstances,
    kCleanup,
    kSsdCleanup,
    kOverwriteBlock,
    kRouter,
  };
  Kind kind = Kind::kMetrics;
  std::uint64_t ticket = 0;    ///< Comes back with the answer.
  std::uint64_t argument = 0;  ///< For kOverwriteBlock: the block, 0 is the most recent.
  RouterQuery router{};        ///< For kRouter.
};

using AdminAnswer = std::variant<std::monostate, Snapshot, std::vector<InstanceInfo>, CleanupReport,
                                 SsdCleanupReport, OverwriteReport, BlocksAnswer, LinksAnswer,
                                 Accepted, RouterRefusal>;

/// The content of /health.
struct Health {
  bool is_ok = false;
  std::string status;  ///< "ok", or the reason why it is not.
  std::uint64_t pool_bytes = 0;
  std::uint64_t done_bytes = 0;       ///< Prepared bytes of the pool.
  engine::PoolPlacement placement{};  ///< Set once the pool is ready.
  struct Peer {
    std::string address;
    std::string state;
    std::string node;  ///< Its incarnation, while it is ready.
    std::string why;   ///< Why it is not ready.
    std::string lane{};
    std::string lane_why{};  ///< Why a better lane is not used.
  };
  std::string node{};  ///< The incarnation of this node.
  /// The best lane, "rdma" or "tcp"; empty without other nodes.
  std::string lane{};
  std::string why_not_rdma{};
  std::vector<std::string> cards{};
  std::vector<std::string> refused_cards{};
  std::string ucx_version{};  ///< Empty without an RDMA lane.
  std::string ucx_library{};
  std::string peer_listen{};  ///< Where peers reach this node.
  std::vector<Peer> peers{};
  std::optional<DirectoryReport> directory{};  ///< With --directory only.
  std::vector<SsdReport::OneDisk> disks{};     ///< The SSD tier's.
  std::optional<KeptReport> kept{};            ///< With --keep only.
};

/// From the RPC thread to the HTTP thread.
struct HttpNews {
  std::uint64_t ticket = 0;  ///< 0: no answer, but a note that there is new health.
  AdminAnswer answer;
  bool is_stop = false;
};

}  // namespace pegaflow::server
