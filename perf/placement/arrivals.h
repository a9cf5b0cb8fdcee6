#pragma once
/// \file
/// The requests of a simulation with their times.

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "index/key.h"
#include "perf/replay/request_trace.h"

namespace pegaflow::perf {

/// Tokens of one block of Mooncake's traces.
inline constexpr std::uint32_t kTraceBlockTokens = 512;

/// One request.
struct PlaceRequest {
  double at = 0;  ///< Seconds from the start.
  std::uint32_t input_tokens = 0;
  std::uint32_t output_tokens = 0;
  std::vector<index::Key> chain;  ///< Its blocks as keys of the index.
};

struct ArrivalOptions {
  /// Arrivals are so many times as dense as in the trace.
  double scale = 1;
  /// So many independent groups of users run the trace at once, each with its own blocks but for
  /// those that open more than 1 % of all prompts (system prompts), and with its own offset.
  std::uint32_t copies = 1;
  /// Requests of one time stamp are spread evenly up to the next one: recorders round.
  bool spread = false;
  /// Otherwise they follow one another after this time: no client sends, and no router accepts, a
  /// burst at one instant.
  double burst_gap_seconds = 0.001;
  /// Load of generated requests, which have no times: the share of the nodes' time that prefill
  /// without any cache would take.
  double load = 1.5;
  std::uint32_t nodes = 8;           ///< For `load`.
  double tokens_per_second = 15000;  ///< For `load`.
  std::uint64_t seed = 1;
};

/// The requests of a trace in the order of their arrival.
/// Errors: kInvalidArgument when a request has fewer tokens than its blocks need.
Result<std::vector<PlaceRequest>> arrivals_of(const RequestTrace& trace,
                                              const ArrivalOptions& options);

/// The share of blocks, as prefixes, that one cache of `blocks` blocks with exact LRU finds when it
/// serves all requests: the ceiling of the hit rate.
double shared_cache_hits(const std::vector<PlaceRequest>& requests, std::size_t blocks);

}  // namespace pegaflow::perf
