#pragma once
/// \file
/// What the server's histogram of turns says about one stretch of time.

#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "harness/server_process.h"

namespace pegaflow::perf {

/// The turns of the RPC thread between two readings of /metrics.
struct Turns {
  std::uint64_t count = 0;
  /// The longest was at most this: the upper edge of its bucket, or the gauge of the longest turn
  /// ever if it rose meanwhile, which is exact. Infinity in the last bucket without the gauge.
  double longest_seconds = 0;
  std::uint64_t above_500us = 0;
};

/// Errors: kInternal when the pages have no such histogram, none with an edge at 500 us, or no turn
/// happened in between.
Result<Turns> turns_between(const harness::ServerProcess::Metrics& before,
                            const harness::ServerProcess::Metrics& after,
                            std::string_view histogram, std::string_view longest_gauge);

}  // namespace pegaflow::perf
