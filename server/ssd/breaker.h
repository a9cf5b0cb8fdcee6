#pragma once
/// \file
/// Stops reads from a disk that fails.

#include <cstddef>

#include "base/clock.h"

namespace pegaflow::server {

/// Opens after three failures within ten seconds: no read for ten seconds, and then one at a time
/// until one succeeds. Thread-bound.
class Breaker {
 public:
  static constexpr Duration kWindow = std::chrono::seconds(10);
  static constexpr std::size_t kFailures = 3;

  /// Whether a read may start.
  [[nodiscard]] bool is_closed(TimePoint now) const noexcept {
    return !is_open_ || (now >= until_ && !is_probing_);
  }
  void began(TimePoint now) noexcept {
    if (is_open_ && now >= until_) is_probing_ = true;
  }
  void succeeded() noexcept {
    is_probing_ = false;
    is_open_ = false;
  }
  void failed(TimePoint now) noexcept {
    is_probing_ = false;
    if (now - first_failure_ > kWindow) {
      failures_ = 0;
      first_failure_ = now;
    }
    ++failures_;
    if (!is_open_ && failures_ < kFailures) return;
    is_open_ = true;
    until_ = now + kWindow;
  }
  [[nodiscard]] bool is_open() const noexcept { return is_open_; }

 private:
  bool is_open_ = false;
  bool is_probing_ = false;
  std::size_t failures_ = 0;
  TimePoint first_failure_{};
  TimePoint until_{};
};

}  // namespace pegaflow::server
