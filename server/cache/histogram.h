#pragma once
/// \file
/// Counts of the times of calls and turns, for metrics.

#include <array>

#include "base/histogram.h"

namespace pegaflow::server {

/// Seconds. 500 us is there because no turn of the RPC thread may pass it.
inline constexpr std::array<double, 12> kRpcBounds = {20e-6,  50e-6, 100e-6, 200e-6, 500e-6, 1e-3,
                                                      2.5e-3, 5e-3,  10e-3,  50e-3,  250e-3, 1.0};

using Histogram = TimeHistogram<kRpcBounds>;

}  // namespace pegaflow::server
