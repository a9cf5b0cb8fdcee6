#pragma once
/// \file
/// The requests and the statistics of prefetches: plain values without KJ.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/block_key.h"
#include "base/id128.h"

namespace pegaflow::server {

/// The blocks that a router wants to be fetched.
struct PrefetchWanted {
  std::string id{};      ///< A name that its router chose. One in progress is not started again.
  std::string tenant{};  ///< Empty: no tenant, whose limit is that of all.
  std::vector<BlockKey> keys{};
  std::vector<Id128> nodes{};  ///< Asked first; see FetchHints.
};

/// The counters of prefetches, for metrics.
struct PrefetchStats {
  std::size_t running = 0;
  std::uint64_t bytes = 0;  ///< Bytes of the pool that they may fill.
  // Since the start.
  std::uint64_t finished = 0;   ///< All blocks that could be had have arrived.
  std::uint64_t cancelled = 0;  ///< Their router cancelled them.
  std::uint64_t ended = 0;      ///< By the deadline, a reset, or a block that did not arrive.
  std::uint64_t rejected = 0;   ///< No room within the limits.
  std::uint64_t blocks = 0;     ///< Blocks that arrived, or were here, of those that finished.
};

}  // namespace pegaflow::server
