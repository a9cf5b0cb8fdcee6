#pragma once
/// \file
/// A simulated node: an engine, its GPU cache, and the pool of its server.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "perf/placement/arrivals.h"
#include "perf/placement/lru_blocks.h"

namespace pegaflow::perf {

/// The hardware that is simulated; all nodes are equal.
struct SimHardware {
  std::size_t gpu_blocks = 1000;
  std::size_t pool_blocks = 5000;
  double tokens_per_second = 15000;    ///< Prefill speed.
  double load_block_seconds = 0.0026;  ///< From the pool to the GPU.
  double link_bytes_per_second = 20e9;
  double link_latency_seconds = 0.0002;
  double bytes_per_token = 131072;
  double decode_step_seconds = 0.025;
  std::uint32_t max_num_seqs = 256;

  [[nodiscard]] double block_bytes() const { return bytes_per_token * kTraceBlockTokens; }
};

/// The outcome of a request at its node. Times are seconds.
struct Served {
  double first_token = 0;
  double done = 0;
  std::uint32_t blocks = 0;
  std::uint32_t hits = 0;    ///< Blocks that were not computed.
  std::uint32_t gpu = 0;     ///< Hits from the GPU cache,
  std::uint32_t pulled = 0;  ///< and from another node; the rest from the pool.
  std::uint32_t uncached_tokens = 0;
  double prefill = 0;  ///< Computation.
};

/// Blocks that came and went with one request, for events.
struct BlockChanges {
  std::uint32_t node = 0;
  std::vector<index::Key> gpu_stored;
  std::vector<index::Key> gpu_erased;
  std::vector<index::Key> pool_stored;
  std::vector<index::Key> pool_erased;
};

/// The engine computes prefills in the order of arrival, one at a time. The blocks that the GPU
/// lacks are loaded from the pool, and those that the pool lacks are pulled from another node, from
/// the arrival on: both overlap the wait. Every block of a prompt ends in both caches. A block can
/// be pulled from a node once it was computed there. Each network card sends one pull at a time,
/// and receives one.
///
/// Because the order is that of arrival, the end of a request is known when it arrives.
/// Thread-bound.
class SimNode {
 public:
  SimNode(std::uint32_t number, const SimHardware& hardware);

  /// Serves a request that arrives at `now`; `source`: the node that it may pull from, or null.
  /// `changes` receives the blocks that came and went.
  Served serve(const PlaceRequest& request, SimNode* source, double now, BlockChanges& changes);

  /// Blocks of the prompt in the GPU cache, and in the GPU cache or the pool, when the engine will
  /// come to it.
  [[nodiscard]] std::size_t gpu_prefix(const PlaceRequest& request) const;
  [[nodiscard]] std::size_t local_prefix(const PlaceRequest& request) const;
  /// Blocks of the prompt that other nodes can pull now.
  [[nodiscard]] std::size_t pool_prefix(const PlaceRequest& request, double now) const;

  /// Whether the first token comes earlier with a pull from `source` than without.
  [[nodiscard]] bool pull_pays(const PlaceRequest& request, const SimNode& source,
                               double now) const;

  /// Seconds until the engine is free.
  [[nodiscard]] double queue(double now) const { return free_at_ > now ? free_at_ - now : 0; }
  [[nodiscard]] double computed() const { return computed_; }  ///< Seconds of prefill.

  // Kept by the simulation, as time passes.
  std::uint32_t waiting = 0;  ///< Requests without a first token.
  std::uint32_t decoding = 0;
  std::uint64_t waiting_tokens = 0;   ///< Uncached tokens of the waiting.
  std::uint64_t decoding_blocks = 0;  ///< Blocks of the prompts that decode.

 private:
  std::uint32_t number_;
  const SimHardware& hardware_;
  LruBlocks gpu_;
  LruBlocks pool_;
  double free_at_ = 0;
  double sends_until_ = 0;
  double receives_until_ = 0;
  double computed_ = 0;
};

}  // namespace pegaflow::perf
