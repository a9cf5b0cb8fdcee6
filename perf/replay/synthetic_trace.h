#pragma once
/// \file
/// Generated request traces for common situations.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "perf/replay/request_trace.h"

namespace pegaflow::perf {

/// A kind of generated workload.
struct WorkloadKind {
  std::string_view name;
  std::string_view sentence;  ///< Description for the help text.
};

/// All kinds:
/// - `conversation`: chats. New conversations arrive independently; half of them continue with
///   probability 3/4 after each turn, after a lognormal pause whose median is the time of 50 new
///   conversations. Each turn adds 1 to 60 blocks, lognormal with a median of 4; a conversation
///   begins with one of five system prompts of 1 to 4 blocks.
/// - `shared-prefix`: 400 system prompts of 4 to 32 blocks, by Zipf's law with exponent 0.8; each
///   request adds 1 to 6 blocks that never recur.
/// - `scan`: one request in four is a document of 30 to 200 blocks that never recurs; the
///   others add a block to one of 300 prompts of 5 to 20 blocks, by Zipf's law with exponent 1.
/// - `zipf`: 3,000 documents of 2 to 40 blocks by Zipf's law with exponent 0.9, and 1 to 4 new
///   blocks after each; every 1,500 requests one rank in five changes places and one document in
///   twenty is replaced.
/// - `agents`: some 60 tasks at a time, each with one of four shared system prompts and one of five
///   lists of tools; a step adds 1 to 4 blocks, one step in twelve forks its task, and recent
///   tasks step more often.
/// - `loop`: 400 prompts of 10 blocks repeated in the same order, as in a benchmark that runs many
///   times. Only a larger pool helps LRU there.
/// - `mixed`: five requests in ten of `conversation`, two each of `zipf` and `agents`, one of
/// `scan`.
std::span<const WorkloadKind> workload_kinds();

/// Generates `requests` requests of a kind; equal seeds give equal requests.
/// Errors: kInvalidArgument, which lists the kinds, or when `requests` is 0.
Result<RequestTrace> synthesize(std::string_view kind, std::uint64_t seed, std::size_t requests);

}  // namespace pegaflow::perf
