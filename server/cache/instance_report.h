#pragma once
/// \file
/// The report about engines for /instances. Plain values.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/id128.h"
#include "capnp/wire/codec.h"
#include "engine/kinds/block_kinds.h"
#include "engine/types/namespace_factors.h"

namespace pegaflow::server {

/// The memory of a worker that others of its direct group may read.
struct DirectInfo {
  std::string group;
  std::string lane;       ///< How those of this host read it: "process_vm_readv" or "cuda".
  std::string network{};  ///< How those of other hosts do: "ucx". Empty: they do not.
};
/// A rank of an engine core.
struct RankInfo {
  std::uint32_t rank = 0;
  std::uint32_t shard = 0;
  /// The consecutive shards that it holds, if engines of other tensor-parallel sizes share the
  /// blocks; 0: one that they do not share.
  std::uint32_t cells = 0;
  bool is_connected = false;
  std::string build;
  Id128 process;
  Id128 connection{};                     ///< None while it is not connected.
  std::vector<std::uint64_t> page_bytes;  ///< By kind of blocks.
  std::uint64_t block_count = 0;
  std::int32_t numa_node = -1;         ///< The NUMA node of its memory, as it reported.
  std::optional<EngineInfo> engine{};  ///< While it is connected and has described itself.
  std::optional<DirectInfo> direct{};  ///< While its memory is registered for such reads.
};
/// A side of an engine that is configured to use the cache and does not.
struct DeclinedInfo {
  Decline decline;
  std::string build;
};
/// An engine core.
struct InstanceInfo {
  std::string id;
  /// "connected", "waiting for ranks", "not served: REASON", "refused: REASON" or
  /// "disconnected".
  std::string state;
  std::string namespace_hash;
  std::vector<engine::NamespaceFactor> factors;
  std::uint64_t generation = 0;
  engine::BlockKinds kinds;  ///< Empty: its blocks are of one kind.
  std::uint32_t shards = 0;
  std::vector<RankInfo> ranks;  ///< Every rank that ever connected, in order.
  std::uint32_t rank_count = 0;
  std::uint32_t schedulers = 0;
  std::optional<EngineInfo> scheduler{};  ///< The report of its scheduler.
  /// A scheduler of it has read the journal: it publishes KV events, and had a request already.
  bool has_kv_events = false;
  /// A scheduler of it has reported which blocks a prompt has.
  bool reports_chains = false;
  std::vector<DeclinedInfo> not_served{};  ///< The scheduler first, then by rank.
};

}  // namespace pegaflow::server
