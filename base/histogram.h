#pragma once
/// \file
/// Counts of durations, for metrics.

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace pegaflow {

/// Counts of durations by upper bounds in seconds (a rising array); the last bucket has no bound. A
/// plain value that the metrics page copies whole.
template <const auto& kUpperBounds>
struct TimeHistogram {
  static constexpr const auto& kBounds = kUpperBounds;

  std::array<std::uint64_t, kUpperBounds.size() + 1> counts{};
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
