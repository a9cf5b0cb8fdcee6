#pragma once
/// \file
/// The results of a replay, as figures and as a table.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "perf/lib/figures.h"
#include "perf/replay/replay_pool.h"
#include "perf/replay/request_trace.h"

namespace pegaflow::perf {

/// The result of one policy in a pool of one size.
struct ReplayResult {
  std::uint64_t blocks = 0;
  std::string eviction;
  ReplayPool::Seen seen{};
  ReplayPool::Counted counted{};
  /// Processor time of the server per request, in microseconds, for each part of the trace.
  std::vector<double> cpu_us{};
  double mean_cpu_us = 0;  ///< Over all requests.
};

/// The policy whose figures are the bounds of the others.
inline constexpr const char* kBoundPolicy = "lru";

/// The figures of all policies in pools of one size, beside those of kBoundPolicy if it is among
/// them. Targets: the hit rate of the default policy is at least the bound's, and the processor
/// time of every policy at most 1.3 times the bound's. Errors: as Rounds::compare().
Result<std::vector<Figure>> replay_figures(const RequestTrace& trace,
                                           std::span<const ReplayResult> of_one_size);

/// "12,031 requests for 288,500 blocks, 182,790 of them different; ..."
std::string describe(const RequestTrace& trace);

/// A printed table with a row for each result, and a note where claims were shortened.
std::string replay_table(std::span<const ReplayResult> results, std::span<const Figure> figures);

/// "12,031".
std::string grouped(std::uint64_t number);

/// Names of figures that other code looks up.
inline constexpr const char* kHitRateRun = "prefix hit rate";
inline constexpr const char* kCpuRun = "CPU of the server a request";

}  // namespace pegaflow::perf
