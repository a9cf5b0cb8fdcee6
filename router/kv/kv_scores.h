#pragma once
/// \file
/// The blocks that each engine has of a prompt, and the cost of a request there.

#include <cstdint>
#include <vector>

#include "index/placement/decision.h"
#include "router/kv/kv_fleet.h"
#include "router/kv/kv_pools.h"

namespace pegaflow::router {

/// One rank of one engine. The pointers are valid until the fleet changes.
struct KvScore {
  const KvFleet::Rank* rank = nullptr;
  const KvPools::Pool* pool = nullptr;  ///< The pool that it loads from; nullptr: not known.
  index::Terms terms{};                 ///< Its blocks, and the cost in seconds.
};

/// All ranks of the candidates, the least cost first.
struct KvScores {
  std::uint32_t block_tokens = 0;  ///< 0: no candidate announces its blocks.
  std::vector<KvScore> ranks{};
};

}  // namespace pegaflow::router
