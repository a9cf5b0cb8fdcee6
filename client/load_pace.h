#pragma once
/// \file
/// Until when a load is of use.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/clock.h"

namespace pegaflow {

/// What computing the blocks of one load takes, counted from the load's acceptance. Knows no clock.
class LoadPace {
 public:
  struct Computing {
    Duration delay{};      ///< Before the engine begins to compute what is not loaded.
    Duration per_block{};  ///< 0: not known.
  };
  enum class Cut : std::uint8_t {
    kStuck,  ///< The node that has the blocks does not answer.
    kSlow,   ///< They arrive, and later than they would be computed.
  };
  /// How much longer than computing a load may take: so long, and a tenth. A prediction is not
  /// exact, and loads that are cut together are computed one after the other.
  static constexpr Duration kSlack = std::chrono::milliseconds(8);

  LoadPace() = default;
  /// Without a value the load is waited for as long as its deadline allows.
  LoadPace(const std::optional<Computing>& computing, TimePoint accepted)
      : computing_(computing), accepted_(accepted) {}

  /// Whether the load ends early when its source does not answer.
  [[nodiscard]] bool is_judged() const noexcept { return computing_.has_value(); }
  /// Whether it ends early, too, when it falls behind computing.
  [[nodiscard]] bool is_compared() const noexcept {
    return is_judged() && computing_->per_block > Duration::zero();
  }

  /// How long computing `blocks` takes, with the time before it begins; no value: not known.
  [[nodiscard]] std::optional<Duration> computing(std::size_t blocks) const noexcept {
    if (!is_compared()) return std::nullopt;
    return computing_->delay + once_begun(blocks);
  }
  /// How long it takes once it has begun; 0: not known.
  [[nodiscard]] Duration once_begun(std::size_t blocks) const noexcept {
    return is_compared() ? computing_->per_block * static_cast<Duration::rep>(blocks) : Duration{};
  }
  /// How long from `now` on it is worth waiting for the last of `left` blocks; no value: not known.
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
