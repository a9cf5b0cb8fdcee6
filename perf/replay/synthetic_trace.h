#pragma once
/// \file
/// Request traces that are made up: what engines ask for in the situations that people meet.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "perf/replay/request_trace.h"

namespace pegaflow::perf {

/// A kind of workload that can be made.
struct WorkloadKind {
  std::string_view name;
  std::string_view sentence;  ///< What asks, and how often: for people.
};

/// All kinds:
/// - `conversation`: people talk. Requests of new conversations come on their own; half of them go
///   on with a chance of 3 in 4 a turn, after a pause that is lognormal with a median of as long as
///   50 new conversations take. Each turn brings 1 to 60 blocks, lognormal with a median of 4; a
///   conversation begins with one of five system prompts of 1 to 4 blocks.
/// - `shared-prefix`: 400 system prompts of 4 to 32 blocks, by Zipf's law with exponent 0.8; each
///   request adds 1 to 6 blocks that never come again.
/// - `scan`: one request in four is a document of 30 to 200 blocks that nobody asks for again; the
///   others add a block to one of 300 prompts of 5 to 20 blocks, by Zipf's law with exponent 1.
/// - `zipf`: 3,000 documents of 2 to 40 blocks by Zipf's law with exponent 0.9, and 1 to 4 new
///   blocks behind each; every 1,500 requests one rank in five changes places and one document in
///   twenty is replaced.
/// - `agents`: some 60 tasks at a time, each with one of four shared system prompts and one of five
///   lists of tools; a step adds 1 to 4 blocks, one step in twelve forks its task, and tasks that
///   began lately step more often.
/// - `loop`: 400 prompts of 10 blocks in the same order again and again, as when one benchmark runs
///   over and over. Nothing but the size of the pool helps LRU there.
/// - `mixed`: five requests in ten of `conversation`, two each of `zipf` and `agents`, one of
/// `scan`.
std::span<const WorkloadKind> workload_kinds();

/// Makes `requests` requests of a kind; the same ones for the same seed.
/// Errors: kInvalidArgument that lists the kinds, or when `requests` is 0.
Result<RequestTrace> synthesize(std::string_view kind, std::uint64_t seed, std::size_t requests);

}  // namespace pegaflow::perf
