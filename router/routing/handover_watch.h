#pragma once
/// \file
/// Suspends a prefill engine whose responses announce no blocks.

#include <utility>

#include "base/clock.h"

namespace pegaflow::router {

/// An engine without a connector, or whose connector does not serve its model, returns a prefill
/// without kv_transfer_params: each long prompt is computed twice. After kMisses such responses in
/// a row the engine is suspended. Then it receives one request in kRetryTime, and the first
/// handover ends the suspension.
///
/// Thread-bound.
class HandoverWatch {
 public:
  static constexpr int kMisses = 32;
  static constexpr std::chrono::seconds kRetryTime{10};

  [[nodiscard]] bool allows(TimePoint now) const noexcept {
    return !is_suspended_ || now >= next_try_;
  }
  /// Records a prefill that is sent.
  void started(TimePoint now) noexcept {
    if (is_suspended_) next_try_ = now + kRetryTime;
  }
  /// Records a response without a handover. Returns true when it suspends the engine.
  bool missed(TimePoint now) noexcept {
    if (is_suspended_ || ++misses_ < kMisses) return false;
    is_suspended_ = true;
    next_try_ = now + kRetryTime;
    return true;
  }
  /// Records a response with a handover. Returns true when the engine was suspended.
  bool worked() noexcept {
    misses_ = 0;
    return std::exchange(is_suspended_, false);
  }
  [[nodiscard]] bool is_suspended() const noexcept { return is_suspended_; }

 private:
  int misses_ = 0;  // Consecutive.
  bool is_suspended_ = false;
  TimePoint next_try_{};
};

}  // namespace pegaflow::router
