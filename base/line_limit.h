#pragma once
/// \file
/// A bound on how often a log line is written that strangers can cause.

#include <cstdint>
#include <optional>
#include <utility>

#include "base/clock.h"

namespace pegaflow {

/// Lets one line pass per interval and counts the others. Thread-bound.
class LineLimit {
 public:
  constexpr explicit LineLimit(Duration interval) noexcept : interval_(interval) {}

  /// The number of lines suppressed since the last one that passed, when this one may be written;
  /// no value when it has to be suppressed.
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
