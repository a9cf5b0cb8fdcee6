#pragma once
/// \file
/// Histograms of the durations of calls and event-loop iterations, for metrics.

#include <array>

#include "base/histogram.h"

namespace pegaflow::server {

/// In seconds. 500 us is the limit of an event-loop iteration of the RPC thread.
inline constexpr std::array<double, 12> kRpcBounds = {20e-6,  50e-6, 100e-6, 200e-6, 500e-6, 1e-3,
                                                      2.5e-3, 5e-3,  10e-3,  50e-3,  250e-3, 1.0};

using Histogram = TimeHistogram<kRpcBounds>;

}  // namespace pegaflow::server
