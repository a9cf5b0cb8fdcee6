#pragma once
/// \file
/// Stops calls to a server that is too slow.

#include <vector>

#include "base/clock.h"

namespace pegaflow {

/// Opens after a number of missed deadlines within a window.
/// Responses in between do not offset them: a server that misses three deadlines in a second costs
/// the engine too much, however many other calls it answers. The owner of the breaker probes the
/// server and closes the breaker.
///
/// Thread-bound.
class Breaker {
 public:
  /// `failures` is at least 1. The clock outlives the breaker.
  Breaker(const Clock& clock, int failures, Duration window);

  /// Notes a call without a response before its deadline. True if this opens the breaker.
  bool on_deadline_missed();

  /// Forgets missed deadlines, after a probe in time or for a new connection.
  void close();

  [[nodiscard]] bool is_open() const noexcept { return open_; }

 private:
  const Clock& clock_;
  const Duration window_;
  std::vector<TimePoint> missed_;  ///< A ring of the latest missed deadlines.
  std::size_t oldest_ = 0;
  bool open_ = false;
};

}  // namespace pegaflow
