#pragma once
/// \file
/// A limit on the rate of log lines that other processes can cause.

#include <cstdint>
#include <optional>
#include <utility>

#include "base/clock.h"

namespace pegaflow {

/// Lets one line pass per interval and counts the others. Thread-bound.
class LineLimit {
 public:
  constexpr explicit LineLimit(Duration interval) noexcept : interval_(interval) {}

  /// The number of lines suppressed since the last one that passed, if this one may be written; no
  /// value if it must be suppressed.
  std::optional<std::uint64_t> pass(TimePoint now) noexcept {
    if (last_ && now - *last_ < interval_) {
      ++suppressed_;
      return std::nullopt;
    }
    last_ = now;
    return std::exchange(suppressed_, 0);
  }

 private:
  Duration interval_;
  std::optional<TimePoint> last_;
  std::uint64_t suppressed_ = 0;
};

}  // namespace pegaflow
