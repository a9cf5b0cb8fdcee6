#pragma once
/// \file
/// A clock that a test moves.

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/clock.h"

namespace pegaflow::testing {

/// The steady clock plus an offset from the test, so that a time-out needs no waiting. Thread-safe.
class ShiftedClock final : public Clock {
 public:
  [[nodiscard]] TimePoint now() const noexcept override {
    return std::chrono::steady_clock::now() + Duration(offset_ns_.load());
  }
  void advance(Duration by) noexcept { offset_ns_ += by.count(); }

 private:
  std::atomic<std::int64_t> offset_ns_{0};
};

}  // namespace pegaflow::testing
