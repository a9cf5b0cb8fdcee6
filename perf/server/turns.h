#pragma once
/// \file
/// The event-loop iterations of the server in a period, from its histogram.

#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "harness/server_process.h"

namespace pegaflow::perf {

/// The event-loop iterations of the RPC thread between two readings of /metrics.
struct Turns {
  std::uint64_t count = 0;
  /// Upper limit of the longest: the upper edge of its bucket, or the exact gauge of the longest
  /// iteration ever if it rose in between. Infinity in the last bucket without the gauge.
  double longest_seconds = 0;
  std::uint64_t above_500us = 0;
};

/// Errors: kInternal when the pages lack the histogram or its edge at 500 us, or when no iteration
/// was counted in between.
Result<Turns> turns_between(const harness::ServerProcess::Metrics& before,
                            const harness::ServerProcess::Metrics& after,
                            std::string_view histogram, std::string_view longest_gauge);

}  // namespace pegaflow::perf
