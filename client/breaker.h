#pragma once
/// \file
/// Decides when a server is too slow to be asked.

#include <vector>

#include "base/clock.h"

namespace pegaflow {

/// Opens after a number of missed deadlines within a window.
///
/// Answers in between do not count against them: a server that misses three deadlines in a second
/// costs the engine too much, however many other calls it answers. Whoever owns the breaker probes
/// and closes it.
///
/// Thread-bound.
class Breaker {
 public:
  /// `failures` is at least 1. The clock outlives the breaker.
  Breaker(const Clock& clock, int failures, Duration window);

  /// A call was not answered before its deadline. True when this opens the breaker.
  bool on_deadline_missed();

  /// A probe was answered in time, or the connection is a new one: missed deadlines are forgotten.
  void close();

  [[nodiscard]] bool is_open() const noexcept { return open_; }

 private:
  const Clock& clock_;
  const Duration window_;
  std::vector<TimePoint> missed_;  ///< A ring of the latest ones.
  std::size_t oldest_ = 0;
  bool open_ = false;
};

}  // namespace pegaflow
