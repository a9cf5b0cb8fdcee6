#pragma once
/// \file
/// What a CacheService knows of engines and of connections: plain rows, for its own files only.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/cache/cache_service.h"

namespace pegaflow::server {

/// One worker of an engine core. What it said stays while its instance does.
struct CacheService::Rank {
  Id128 worker;  ///< Its connection; none while it is away. What follows is the last worker's.
  Id128 process;
  std::string build;
  std::uint32_t shard = 0;
  std::uint64_t page_bytes = 0;
  std::uint64_t block_count = 0;
  std::int32_t node = -1;
};

/// One engine core. Lives while a connection, there or parted, belongs to it.
struct CacheService::Instance {
  std::string id;
  std::uint32_t index = 0;       ///< Its name in the store.
  std::uint32_t references = 0;  ///< Clients and parted connections.
  std::uint32_t schedulers = 0;
  std::uint32_t connected = 0;  ///< Ranks.
  std::uint32_t shards = 0;
  std::uint64_t block_bytes = 0;  ///< Of all its shards' pages; since it was complete.
  std::vector<Rank> ranks;        ///< Empty before the first registers.
  engine::NamespaceId space_name{};
  std::string namespace_hash;
  Bytes32 space{};      ///< What other nodes call its namespace; since it was complete.
  std::string refused;  ///< Why it is not served although all ranks are there.

  [[nodiscard]] bool is_complete() const {
    return connected != 0 && connected == ranks.size() && refused.empty();
  }
  /// The rank that saves a shard: the lowest that holds it.
  [[nodiscard]] std::uint32_t saver(std::uint32_t shard) const {
    for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
      if (ranks[rank].shard == shard) return rank;
    }
    return 0;
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
  std::uint32_t rank = 0;  ///< Of a worker.
  bool is_scheduler = false;
  Id128 scheduler;  ///< What its jobs are named after; none: it did not say.
  bool said_goodbye = false;
  std::optional<EngineInfo> engine;  ///< What describe() reported.
  std::optional<Decline> declined;   ///< It belongs to no instance then.
};

/// What a connection left behind that its process may still touch.
struct CacheService::Detached {
  Id128 process;
  engine::HolderId holder{};
  Instance* instance = nullptr;
  std::shared_ptr<void> watch;
};

}  // namespace pegaflow::server
