#pragma once
/// \file
/// How many bytes may be written to the disks of a node: their daily budget.

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace pegaflow::engine::ssd {

/// A token bucket of bytes with a burst of one hour. Blocks that were used again since they were
/// saved may empty it; others only its upper half, so that they never take the room of those.
/// Thread-bound.
class WriteBudget {
 public:
  /// `bytes_per_day` 0: no limit.
  WriteBudget(std::uint64_t bytes_per_day, TimePoint now)
      : rate_(static_cast<double>(bytes_per_day) / 86400.0), tokens_(burst()), filled_at_(now) {}

  /// Takes `bytes`, or returns false.
  bool take(std::uint64_t bytes, bool was_used, TimePoint now) {
    if (rate_ == 0) return true;
    fill(now);
    const double floor = was_used ? 0 : burst() / 2;
    if (tokens_ - static_cast<double>(bytes) < floor) return false;
    tokens_ -= static_cast<double>(bytes);
    return true;
  }
  [[nodiscard]] bool is_limited() const noexcept { return rate_ != 0; }

 private:
  [[nodiscard]] double burst() const { return rate_ * 3600; }
  void fill(TimePoint now) {
    const double seconds = std::chrono::duration<double>(now - filled_at_).count();
    tokens_ = std::min(burst(), tokens_ + rate_ * std::max(0.0, seconds));
    filled_at_ = now;
  }

  double rate_;
  double tokens_;
  TimePoint filled_at_;
};

}  // namespace pegaflow::engine::ssd
