#pragma once
/// \file
/// What a replay found out, as figures and as a table.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "perf/lib/figures.h"
#include "perf/replay/replay_pool.h"
#include "perf/replay/request_trace.h"

namespace pegaflow::perf {

/// One policy in a pool of one size.
struct ReplayResult {
  std::uint64_t blocks = 0;
  std::string eviction;
  ReplayPool::Seen seen{};
  ReplayPool::Counted counted{};
  /// Processor time of the server a request, in microseconds: of each part of the trace.
  std::vector<double> cpu_us{};
  double mean_cpu_us = 0;  ///< Of all requests.
};

/// A policy that others are held against.
inline constexpr const char* kBoundPolicy = "lru";

/// The figures of all policies in pools of one size; each beside kBoundPolicy where that is one of
/// them. The default policy is to find at least as much, and each may cost 1.3 times as much.
/// Errors: as Rounds::compare().
Result<std::vector<Figure>> replay_figures(const RequestTrace& trace,
                                           std::span<const ReplayResult> of_one_size);

/// "12,031 requests for 288,500 blocks, 182,790 of them different; ..."
std::string describe(const RequestTrace& trace);

/// A row for each result, for people, and a note where claims were shortened.
std::string replay_table(std::span<const ReplayResult> results, std::span<const Figure> figures);

/// "12,031".
std::string grouped(std::uint64_t number);

/// The figures that others look for by their names.
inline constexpr const char* kHitRateRun = "prefix hit rate";
inline constexpr const char* kCpuRun = "CPU of the server a request";

}  // namespace pegaflow::perf
