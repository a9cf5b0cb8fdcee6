#pragma once
/// \file
/// How fast another node is read from, and how much is queued there.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/clock.h"

namespace pegaflow {

/// What a claim is compared with: how long its engine computes the blocks that are not here.
struct ComputeTime {
  Duration delay{};      ///< Before it begins.
  Duration per_block{};  ///< 0: not known; then whatever can be fetched is.

  [[nodiscard]] bool is_known() const noexcept { return per_block > Duration::zero(); }
  [[nodiscard]] Duration of(std::size_t blocks) const noexcept {
    return delay + per_block * static_cast<Duration::rep>(blocks);
  }
};

/// When blocks are predicted to arrive, from now on. 0: not known.
struct Arrival {
  Duration first{};
  Duration last{};
};

/// One source of bytes: its rate while it was read from, and the bytes that were asked for and have
/// not come. Thread-bound.
class SourceRate {
 public:
  /// Of reads in a row the older ones count half after so much time of reading.
  static constexpr Duration kWindow = std::chrono::milliseconds(500);
  /// A rate that is older is not believed when it says that the source is slow: the source is
  /// probed.
  static constexpr Duration kBelieved = std::chrono::seconds(10);
  /// From a claim's answer to the first question on the lane, and back.
  static constexpr Duration kLatency = std::chrono::microseconds(500);

  /// Bytes that are queued as long as it lives.
  class Queued {
   public:
    Queued(std::shared_ptr<SourceRate> source, std::uint64_t bytes)
        : source_(std::move(source)), bytes_(bytes) {
      source_->queued_ += bytes_;
    }
    ~Queued() { source_->queued_ -= bytes_; }
    Queued(const Queued&) = delete;
    Queued& operator=(const Queued&) = delete;

   private:
    std::shared_ptr<SourceRate> source_;
    std::uint64_t bytes_;
  };

  /// `bytes` that were asked for at `since` are here. Reads overlap: each counts from the end of
  /// the one before it.
  void arrived(std::uint64_t bytes, TimePoint since, TimePoint now) {
    const Duration took = now - std::max(since, last_end_);
    last_end_ = now;
    bytes_ += static_cast<double>(bytes);
    seconds_ += std::max(1e-9, std::chrono::duration<double>(took).count());
    if (seconds_ > std::chrono::duration<double>(kWindow).count()) {
      bytes_ /= 2;
      seconds_ /= 2;
    }
  }

  [[nodiscard]] bool is_known() const noexcept { return seconds_ > 0; }
  [[nodiscard]] bool is_fresh(TimePoint now) const noexcept {
    return is_known() && now - last_end_ < kBelieved;
  }
  /// 0 while it is not known.
  [[nodiscard]] double bytes_per_second() const noexcept {
    return is_known() ? bytes_ / seconds_ : 0.0;
  }
  [[nodiscard]] std::uint64_t queued_bytes() const noexcept { return queued_; }

  /// Predicts when `bytes` arrive that are requested now, and when their first `batch` is complete.
  [[nodiscard]] Arrival predict(std::uint64_t bytes, std::uint64_t batch) const {
    if (!is_known()) return {};
    const auto time = [this](std::uint64_t ahead) {
      return kLatency + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(
                            static_cast<double>(ahead) / bytes_per_second()));
    };
    return {.first = time(queued_ + std::min(bytes, batch)), .last = time(queued_ + bytes)};
  }

 private:
  double bytes_ = 0;
  double seconds_ = 0;
  TimePoint last_end_{};
  std::uint64_t queued_ = 0;
};

}  // namespace pegaflow
