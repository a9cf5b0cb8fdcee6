#pragma once
/// \file
/// Whether a load is still faster than computing.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/clock.h"

namespace pegaflow {

/// Watches the blocks of one load that arrive from another node, against what was promised and
/// against computing them. Bound to its owner's thread; knows no clock.
class LoadPace {
 public:
  struct Promise {
    /// When the first and the last block of another node are predicted to arrive, from the load's
    /// acceptance on. `last` 0: not known; then nothing is judged.
    Duration first{};
    Duration last{};
    Duration compute_delay{};  ///< Before the engine begins to compute what is not loaded.
    Duration compute_block{};  ///< How long it computes one block. 0: not known.
  };
  enum class Cut : std::uint8_t {
    kStuck,  ///< Blocks do not arrive when they should.
    kSlow,   ///< They arrive, and later than they would be computed.
  };
  /// How far behind its promise a load may be. A source that stops costs this, half of the time
  /// between two arrivals, and kInterval.
  static constexpr Duration kSlack = std::chrono::milliseconds(8);
  /// How often a load whose blocks are due is looked at.
  static constexpr Duration kInterval = std::chrono::milliseconds(5);

  LoadPace() = default;
  LoadPace(const Promise& promise, TimePoint accepted)
      : promise_(promise), accepted_(accepted), due_(accepted + promise.first + kSlack) {}

  [[nodiscard]] bool is_judged() const noexcept {
    return promise_.last > Duration::zero() && promise_.compute_block > Duration::zero();
  }

  /// How long computing `blocks` takes, counted from the load's acceptance; no value: not known.
  [[nodiscard]] std::optional<Duration> computing(std::size_t blocks) const noexcept {
    if (promise_.compute_block <= Duration::zero()) return std::nullopt;
    return promise_.compute_delay + times(promise_.compute_block, blocks);
  }

  /// `blocks` of `coming`, which were not here when they were asked for, are here.
  void arrived(std::size_t blocks, std::size_t coming, TimePoint now) {
    if (blocks == 0) return;
    if (arrived_ == 0) {
      first_at_ = now;
      first_blocks_ = blocks;
    }
    arrived_ += blocks;
    Duration interval = times((promise_.last - promise_.first) /
                                  static_cast<Duration::rep>(std::max<std::size_t>(1, coming)),
                              blocks);
    if (const auto each = per_block(now)) interval = std::max(interval, times(*each, blocks));
    due_ = std::max(now, accepted_ + promise_.first) + interval * 3 / 2 + kSlack;
  }

  /// How long a question for the next blocks may be kept: an answer with none tells nothing before
  /// they are due.
  [[nodiscard]] Duration patience(TimePoint now) const noexcept {
    return std::max<Duration>(kInterval, due_ - now);
  }
  /// Whether the next blocks should be here and are not. Asked after a question for them was
  /// answered with none.
  [[nodiscard]] bool is_stuck(TimePoint now) const noexcept { return is_judged() && now > due_; }
  /// Whether the `left` blocks that are not here are computed sooner than they arrive.
  [[nodiscard]] bool is_slow(std::size_t left, TimePoint now) const {
    const auto each = per_block(now);
    if (!is_judged() || !each) return false;
    const Duration delay = std::max(Duration::zero(), promise_.compute_delay - (now - accepted_));
    return times(*each, left) > delay + times(promise_.compute_block, left) + kSlack;
  }

 private:
  static Duration times(Duration time, std::size_t count) {
    return time * static_cast<Duration::rep>(count);
  }
  /// Between two blocks, as they arrived so far; no value before the second arrival.
  [[nodiscard]] std::optional<Duration> per_block(TimePoint now) const {
    if (arrived_ <= first_blocks_) return std::nullopt;
    return (now - first_at_) / static_cast<Duration::rep>(arrived_ - first_blocks_);
  }

  Promise promise_;
  TimePoint accepted_{};
  TimePoint due_{};  ///< When the next blocks should be here.
  TimePoint first_at_{};
  std::size_t first_blocks_ = 0;
  std::size_t arrived_ = 0;
};

}  // namespace pegaflow
