#pragma once
/// \file
/// The statistics of the cache, for metrics: plain values without KJ.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "capnp/wire/decline_reasons.h"
#include "engine/block_store.h"
#include "engine/demand/demand.h"
#include "engine/kinds/block_kinds.h"

namespace pegaflow::server {

/// The statistics of JobWaits.
struct JobWaitStats {
  std::size_t waiting = 0;  ///< Now.
  // Since the start.
  std::uint64_t over = 0;
  std::uint64_t gone = 0;
  std::uint64_t timed_out = 0;
  std::uint64_t busy = 0;
  std::uint64_t cancelled = 0;
};

/// The statistics of the blocks of one rule, since the start.
struct KindStats {
  std::uint64_t saved_blocks = 0;  ///< Sealed by saves.
  std::uint64_t saved_bytes = 0;
  std::uint64_t loaded_blocks = 0;  ///< Opened for a load, counted once for each rank.
  std::uint64_t loaded_bytes = 0;
  /// Lookups that the kind made shorter than the prefix of full attention, and by how much.
  std::uint64_t shortened_lookups = 0;
  std::uint64_t shortened_tokens = 0;
};

/// The statistics of CacheService.
struct CacheStats {
  engine::BlockStore::Stats store;
  std::vector<engine::BlockStore::ShapeStats> shapes;
  std::uint64_t memory_bytes = 0;  ///< Beside the pool.
  std::size_t clients = 0;
  std::size_t detached = 0;
  std::size_t instances = 0;
  std::size_t instances_waiting = 0;  ///< Some of their ranks are connected, and not all.
  /// Instances of which a side has declined, each counted once, by the reason that /instances
  /// shows.
  std::array<std::size_t, kDeclineReasons> instances_declined{};
  std::size_t instances_refused = 0;  ///< All of their ranks are connected, and refused.
  std::size_t namespaces = 0;
  std::size_t space_names = 0;  ///< Names by which other nodes may request namespaces.
  // Since the start.
  std::uint64_t load_bytes = 0;
  std::uint64_t load_blocks_own = 0;    ///< Written by the process that loads them.
  std::uint64_t load_blocks_other = 0;  ///< Written by another one.
  std::uint64_t save_bytes = 0;
  std::array<KindStats, engine::kKindRules> kinds{};  ///< By engine::KindRule.
  std::uint64_t fetch_bytes = 0;                      ///< Bytes of blocks fetched from other nodes.
  std::uint64_t lent_bytes = 0;                       ///< Bytes of blocks lent to other nodes.
  std::uint64_t refused_page_size = 0;                ///< Registrations.
  std::vector<engine::Demand::Window> demand;         ///< One for each window.
  std::uint64_t lookup_blocks_not_served = 0;  ///< Requested by instances that are not complete.
  std::uint64_t corrupt_pages = 0;             ///< Reported by the workers that loaded them.
  std::size_t epochs = 0;                      ///< Namespaces with an epoch of their own.
  std::uint64_t resets_here = 0;               ///< Requested by an engine of this node.
  std::uint64_t resets_learned = 0;            ///< Received from other nodes.
  std::uint64_t resets_unconfirmed = 0;        ///< Nodes that did not confirm one in time.
  std::optional<std::uint32_t> next_victim_idle_s;
  JobWaitStats waits;
};

}  // namespace pegaflow::server
