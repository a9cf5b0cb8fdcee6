#pragma once
/// \file
/// Time as a dependency, so that tests own it.

#include <chrono>

namespace pegaflow {

using Duration = std::chrono::nanoseconds;
using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Duration>;

/// Monotonic time. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  [[nodiscard]] virtual TimePoint now() const noexcept = 0;
};

/// CLOCK_MONOTONIC. Immutable.
class SteadyClock final : public Clock {
 public:
  [[nodiscard]] TimePoint now() const noexcept override { return std::chrono::steady_clock::now(); }
};

/// A clock that stands still until it is set. Thread-bound; for tests and simulations.
class ManualClock final : public Clock {
 public:
  [[nodiscard]] TimePoint now() const noexcept override { return now_; }
  void advance(Duration by) noexcept { now_ += by; }

 private:
  TimePoint now_{};
};

}  // namespace pegaflow
