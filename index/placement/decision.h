#pragma once
/// \file
/// A request to be placed, and the decision with everything that explains it.

#include <cstddef>
#include <cstdint>
#include <span>

#include "index/placement/rates.h"
#include "index/placement/record.h"

namespace pegaflow::index {

/// One engine that may receive the request, and what it holds of the prompt: filled from
/// BlockIndex::match(). An engine whose source is not trusted has zeros; it is then placed by load,
/// at the full price of its prefill.
struct Candidate {
  EngineId engine = kNoEngine;
  std::uint32_t gpu_blocks = 0;    ///< Prefix in the engine's own cache (G).
  std::uint32_t local_blocks = 0;  ///< Prefix in its cache or its node's pool (L); at least G.
};

/// A pool that holds a prefix of the prompt. Only trusted nodes are listed.
struct PullSource {
  NodeId node = kNoNode;
  std::uint32_t blocks = 0;  ///< Prefix in the pool.
};

/// A request as placement sees it. The spans are read during the call only.
struct PlacementRequest {
  std::uint32_t prompt_tokens = 0;  ///< Known or estimated; above 0.
  std::uint32_t block_tokens = 16;
  std::span<const Candidate> candidates{};
  /// Pools to pull from, in any order. Entries shorter than the longest by more than a block are
  /// considered only when they have a faster link. At most kMaxSources are read.
  std::span<const PullSource> sources{};
};

/// Limit of the pools that one decision considers.
inline constexpr std::size_t kMaxSources = 16;

/// The terms of the cost of one candidate, in seconds.
struct Terms {
  EngineId engine = kNoEngine;
  std::uint32_t gpu_blocks = 0;       ///< G.
  std::uint32_t local_blocks = 0;     ///< L.
  std::uint32_t reach_blocks = 0;     ///< Prefix that the engine has after the fetch.
  NodeId source = kNoNode;            ///< Node to pull from; kNoNode: no pull pays ("compute").
  std::uint32_t uncached_tokens = 0;  ///< To compute after the fetch.
  std::uint64_t pull_bytes = 0;
  double queue = 0;    ///< Wait for the prefills before it.
  double fetch = 0;    ///< Load from the own pool and pull from `source`; overlaps `queue`.
  double prefill = 0;  ///< Computation of the uncached tokens.
  double delay = 0;    ///< Cost of its computation to requests that come to wait behind it.
  double decode = 0;   ///< Cost of its computation to requests that decode there.
  double space = 0;    ///< Value of the blocks that its new blocks evict there.
  double room = 0;     ///< Risk that the engine has to preempt for lack of KV memory.
  /// max(queue, fetch) + prefill + delay + decode + space + room.
  double cost = 0;
  [[nodiscard]] double first_token() const noexcept {
    return (queue > fetch ? queue : fetch) + prefill;
  }
};

/// A decision with everything that explains it. Owned by the Placement and valid until its next
/// decision; copy what is kept.
struct Decision {
  std::size_t chosen = 0;  ///< Index into `terms`.
  /// One entry for each candidate whose engine exists, in their order.
  std::span<const Terms> terms;
  double band = 0;                ///< Candidates within this of the least cost are near-equals.
  std::uint32_t near_equals = 0;  ///< Candidates in the band.
  /// The owners for the hint, best first, those of the chosen engine's own node left out. Empty:
  /// the hint is "compute".
  std::span<const PullSource> sources;
  /// Tokens that the engine is expected to report as cached, if the pull arrives.
  std::uint32_t predicted_cached_tokens = 0;

  [[nodiscard]] const Terms& best() const noexcept { return terms[chosen]; }
};

/// The engines for prefill and decode, or one engine for both.
struct PairDecision {
  bool skips_prefill = false;  ///< The decode engine computes the prompt itself.
  Terms prefill;               ///< Unset when `skips_prefill`.
  Terms decode;                ///< Its `prefill` is that of what did not come from the other.
  double transfer = 0;         ///< Seconds from the prefill's node to the decode's.
  double cost = 0;             ///< Cost of the pair.
  double alone_cost = 0;       ///< Cost of the best decode engine alone; infinity without one.
  std::uint32_t pairs = 0;     ///< Pairs that were compared.
};

/// The properties of an engine that is added.
struct EngineSetup {
  NodeId node = kNoNode;  ///< The node whose pool it uses; kNoNode: none.
  std::uint32_t max_num_seqs = 256;
  bool decodes = true;  ///< False for prefill engines: no decode interference.
  PrefillRate::Options rate{};
};

/// An engine's report about itself (its metrics), by which the router corrects its accounts.
struct EngineLoad {
  std::uint32_t waiting = 0;  ///< Requests in its queue.
  std::uint32_t running = 0;
  double kv_use = 0;  ///< Share of its KV memory in use, in [0, 1].
};

/// Options of a Placement.
struct PlacementOptions {
  std::uint32_t max_engines = 1024;    ///< 1 to 4,096.
  std::uint32_t max_nodes = 1024;      ///< 1 to 4,096.
  std::uint32_t max_requests = 65536;  ///< In flight, those of other routers included.
  std::uint32_t max_routers = 16;
  std::uint64_t seed = 1;
  double bytes_per_token = 131072;  ///< Bytes of KV cache; see set_bytes_per_token().
  double band_seconds = 0.002;      ///< Least width of the band of near-equals.
  double band_share = 0.05;         ///< Its width as a share of the least cost.
  /// Seconds that a second of prefill costs when max_num_seqs requests decode beside it.
  double decode_weight = 0.2;
  double delay_weight = 0.5;  ///< Weight of the term `delay`; 0 leaves it out.
  /// The term `space`, as a share of the time that computing the new blocks takes, at an engine
  /// that takes as many new blocks as the mean. 0 leaves it out.
  double space_weight = 0.2;
  double room_from = 0.9;  ///< KV use from which the term `room` grows.
  LinkRate pool{.latency_seconds = 0, .bytes_per_second = 25e9};  ///< Until set_pool().
  Lane lane = Lane::kTcp;  ///< Assumed for links without a measurement.
};

/// Counts of a Placement.
struct PlacementStats {
  std::uint64_t decisions = 0;
  std::uint64_t pulls = 0;      ///< Placements with a source.
  std::uint64_t timed_out = 0;  ///< Requests that ended by their time limit.
  std::uint64_t uncounted = 0;  ///< Placements refused at max_requests.
  std::uint64_t healed = 0;     ///< Heartbeats that changed a sum.
  std::uint64_t inflight = 0;   ///< Requests in the accounts now.
};

}  // namespace pegaflow::index
