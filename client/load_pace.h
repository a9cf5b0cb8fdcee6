#pragma once
/// \file
/// The time until which a load is useful.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/clock.h"

namespace pegaflow {

/// The time that computing the blocks of one load takes, counted from the load's acceptance. Reads
/// no clock.
class LoadPace {
 public:
  struct Computing {
    Duration delay{};      ///< Before the engine begins to compute the blocks that are not loaded.
    Duration per_block{};  ///< 0: unknown.
  };
  enum class Cut : std::uint8_t {
    kStuck,  ///< The node that has the blocks does not respond.
    kSlow,   ///< The blocks arrive later than they would be computed.
  };
  /// A load may take this much longer than computing, plus a tenth: predictions are not exact, and
  /// loads that are cut together are computed one after the other.
  static constexpr Duration kSlack = std::chrono::milliseconds(8);

  LoadPace() = default;
  /// Without a value the load may take as long as its deadline allows.
  LoadPace(const std::optional<Computing>& computing, TimePoint accepted)
      : computing_(computing), accepted_(accepted) {}

  /// Whether the load ends early when its source does not respond.
  [[nodiscard]] bool is_judged() const noexcept { return computing_.has_value(); }
  /// Whether it also ends early when it falls behind computing.
  [[nodiscard]] bool is_compared() const noexcept {
    return is_judged() && computing_->per_block > Duration::zero();
  }

  /// The time until `blocks` would be computed, the delay included; no value: unknown.
  [[nodiscard]] std::optional<Duration> computing(std::size_t blocks) const noexcept {
    if (!is_compared()) return std::nullopt;
    return computing_->delay + once_begun(blocks);
  }
  /// The same without the delay; 0: unknown.
  [[nodiscard]] Duration once_begun(std::size_t blocks) const noexcept {
    return is_compared() ? computing_->per_block * static_cast<Duration::rep>(blocks) : Duration{};
  }
  /// The time from `now` for which waiting for the last of `left` blocks is useful; no value:
  /// unknown.
  [[nodiscard]] std::optional<Duration> worth(std::size_t left, TimePoint now) const {
    if (!is_compared()) return std::nullopt;
    const Duration delay = std::max(Duration::zero(), computing_->delay - (now - accepted_));
    return (delay + once_begun(left)) * 11 / 10 + kSlack;
  }

 private:
  std::optional<Computing> computing_;
  TimePoint accepted_{};
};

}  // namespace pegaflow
