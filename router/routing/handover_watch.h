#pragma once
/// \file
/// Stops prefilling apart at an engine that hands nothing over.

#include <utility>

#include "base/clock.h"

namespace pegaflow::router {

/// An engine without a connector, or whose connector does not serve its model, answers a prefill
/// without kv_transfer_params: each long prompt is computed twice. After kMisses such answers in a
/// row the engine is suspended; then one request in kRetryTime is tried, and the first handover
/// ends it.
///
/// Thread-bound.
class HandoverWatch {
 public:
  static constexpr int kMisses = 32;
  static constexpr std::chrono::seconds kRetryTime{10};

  [[nodiscard]] bool allows(TimePoint now) const noexcept {
    return !is_suspended_ || now >= next_try_;
  }
  /// A prefill goes out.
  void started(TimePoint now) noexcept {
    if (is_suspended_) next_try_ = now + kRetryTime;
  }
  /// An answer without a handover. True when that suspends the engine.
  bool missed(TimePoint now) noexcept {
    if (is_suspended_ || ++misses_ < kMisses) return false;
    is_suspended_ = true;
    next_try_ = now + kRetryTime;
    return true;
  }
  /// An answer with one. True when the engine was suspended.
  bool worked() noexcept {
    misses_ = 0;
    return std::exchange(is_suspended_, false);
  }
  [[nodiscard]] bool is_suspended() const noexcept { return is_suspended_; }

 private:
  int misses_ = 0;  // In a row.
  bool is_suspended_ = false;
  TimePoint next_try_{};
};

}  // namespace pegaflow::router
