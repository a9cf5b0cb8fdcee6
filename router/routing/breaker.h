#pragma once
/// \file
/// The circuit breaker of one engine.

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace pegaflow::router {

/// Closed: every request may go to the engine. Open: none, for a time that doubles with each
/// relapse up to a limit. Then half open: one request at a time tries, and its outcome decides.
///
/// Thread-bound.
class Breaker {
 public:
  struct Options {
    std::int64_t failures = 5;  ///< Failures in a row that open the breaker.
    Duration open_time = std::chrono::seconds(2);
    Duration open_time_limit = std::chrono::seconds(30);
  };

  explicit Breaker(const Options& options) : options_(options) {}

  enum class State : unsigned char { kClosed, kOpen, kHalfOpen };

  [[nodiscard]] State state(TimePoint now) const noexcept {
    if (!open_) return State::kClosed;
    return now < open_until_ ? State::kOpen : State::kHalfOpen;
  }
  [[nodiscard]] bool allows(TimePoint now) const noexcept {
    switch (state(now)) {
      case State::kClosed:
        return true;
      case State::kOpen:
        return false;
      case State::kHalfOpen:
        return !trying_;
    }
    return false;
  }

  /// Records a request that is sent. One of the three functions below follows each.
  void started(TimePoint now) noexcept { trying_ = trying_ || state(now) == State::kHalfOpen; }
  void succeeded() noexcept {
    open_ = trying_ = false;
    failures_ = 0;
    relapses_ = 0;
  }
  void failed(TimePoint now) noexcept {
    ++failures_;
    if (!open_ && failures_ < options_.failures) return;
    if (open_ && now < open_until_ && !trying_) return;  // Sent before the breaker opened.
    const Duration doubled = options_.open_time * (std::int64_t{1} << std::min(relapses_, 20));
    open_until_ = now + std::min(doubled, options_.open_time_limit);
    ++relapses_;
    ++opened_;
    open_ = true;
    trying_ = false;
  }
  /// Records a request without an outcome, because its client left.
  void withdrawn() noexcept { trying_ = false; }

  [[nodiscard]] std::uint64_t opened() const noexcept { return opened_; }  ///< Count.

 private:
  Options options_;
  std::int64_t failures_ = 0;
  int relapses_ = 0;
  bool open_ = false;
  bool trying_ = false;
  TimePoint open_until_{};
  std::uint64_t opened_ = 0;
};

}  // namespace pegaflow::router
