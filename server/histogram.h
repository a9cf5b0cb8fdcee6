#pragma once
/// \file
/// Counts of times, for metrics.

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace pegaflow {

/// How often something took how long. A plain value: copied whole to whoever prints it.
struct Histogram {
  /// Upper bounds in seconds; a last bucket has none. 500 us is there because no turn of the RPC
  /// thread may pass it.
  static constexpr std::array<double, 12> kBounds = {20e-6,  50e-6, 100e-6, 200e-6, 500e-6, 1e-3,
                                                     2.5e-3, 5e-3,  10e-3,  50e-3,  250e-3, 1.0};

  std::array<std::uint64_t, kBounds.size() + 1> counts{};
  double sum_seconds = 0;
  double longest_seconds = 0;

  void record(Duration time) noexcept {
    const double seconds = std::chrono::duration<double>(time).count();
    std::size_t bucket = 0;
    while (bucket < kBounds.size() && seconds > kBounds[bucket]) ++bucket;
    ++counts[bucket];
    sum_seconds += seconds;
    if (seconds > longest_seconds) longest_seconds = seconds;
  }
  [[nodiscard]] std::uint64_t count() const noexcept {
    std::uint64_t sum = 0;
    for (const std::uint64_t each : counts) sum += each;
    return sum;
  }
};

}  // namespace pegaflow
