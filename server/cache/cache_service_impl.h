#pragma once
/// \file
/// The rows of CacheService for engines and connections, for its own sources only.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/cache/cache_service.h"

namespace pegaflow::server {

/// One worker of an engine core. Its report stays as long as its instance.
struct CacheService::Rank {
  Id128 worker;  ///< Its connection; none while disconnected. The rest is the last worker's.
  Id128 process;
  std::string build;
  std::uint32_t shard = 0;
  std::uint32_t cells = 1;  ///< The consecutive shards that it holds, from `shard` on.
  std::vector<std::uint64_t> page_bytes;  ///< By kind of blocks, of its shards together.
  std::uint64_t block_count = 0;
  std::int32_t numa_node = -1;
  /// The backend of the network through which it reads the pools of other nodes; empty: it does
  /// not.
  std::string pool_backend;
  bool reads_pools_slowly = false;
  std::uint64_t segments = 1;  ///< Count of the pieces of a page in its memory, if it does.
};

/// One engine core. Exists while a connection, open or detached, belongs to it.
struct CacheService::Instance {
  std::string id;
  std::uint32_t index = 0;       ///< Its name in the store.
  std::uint32_t references = 0;  ///< Clients and detached connections.
  std::uint32_t schedulers = 0;
  std::uint32_t connected = 0;  ///< Connected ranks.
  std::uint32_t shards = 0;
  /// The consecutive shards of each rank, in blocks that engines of other tensor-parallel sizes
  /// share; 0: each rank has one shard, and only engines of this size have such blocks.
  std::uint32_t cells = 0;
  engine::BlockKinds rules;  ///< The rules of its kinds of blocks; empty: one kind, a prefix.
  /// The most kinds that it ever had: a scheduler may hold claims from before its ranks registered
  /// again.
  std::size_t most_kinds = 1;
  /// By kind, the sum of the pages of a block; set once it is complete.
  std::vector<std::uint64_t> block_bytes;
  std::vector<Rank> ranks;  ///< Empty before the first registers.
  engine::NamespaceId space_name{};
  std::string namespace_hash;
  /// By kind, the name of its namespace among nodes; set once it is complete.
  std::vector<Bytes32> spaces;
  std::string refused;  ///< Why it is not served although all ranks are connected.

  [[nodiscard]] bool is_complete() const {
    return connected != 0 && connected == ranks.size() && refused.empty();
  }
  /// The rank that saves a shard: the lowest that holds it.
  [[nodiscard]] std::uint32_t saver(std::uint32_t shard) const {
    for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
      if (holds(rank, shard)) return rank;
    }
    return 0;
  }
  [[nodiscard]] bool holds(std::uint32_t rank, std::uint32_t shard) const {
    return ranks[rank].shard <= shard && shard - ranks[rank].shard < ranks[rank].cells;
  }
  /// The ranks without replicas: each writes its shards of a block at once.
  [[nodiscard]] std::uint32_t writers() const { return shards / std::max(1U, cells); }
  /// The place among them of the rank that writes `shard`.
  [[nodiscard]] std::uint32_t writer_of(std::uint32_t shard) const {
    return shard / std::max(1U, cells);
  }
};

struct CacheService::Client {
  Id128 connection;
  Id128 process;
  std::string build;
  std::shared_ptr<void> watch;
  Instance* instance = nullptr;
  std::optional<engine::HolderId> holder;  ///< From the moment it belongs to an instance.
  bool is_worker = false;
  std::uint32_t rank = 0;  ///< A worker's rank.
  bool is_scheduler = false;
  Id128 scheduler;  ///< The name of its jobs; none: unnamed.
  bool said_goodbye = false;
  bool reads_journal = false;        ///< Its engine publishes KV events.
  bool reports_chains = false;       ///< It has reported which blocks a prompt has.
  std::optional<EngineInfo> engine;  ///< The report of describe().
  std::optional<Decline> declined;   ///< Set only without an instance.
};

/// An ended connection whose process may still access pages.
struct CacheService::Detached {
  Id128 process;
  engine::HolderId holder{};
  Instance* instance = nullptr;
  std::shared_ptr<void> watch;
};

}  // namespace pegaflow::server
