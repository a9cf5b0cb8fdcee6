#pragma once
/// \file
/// The rate of reads from one owner of blocks, and the bytes that are queued there.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "base/clock.h"

namespace pegaflow::cluster {

/// The time in which an engine computes the blocks of a claim that are not local.
struct ComputeTime {
  Duration delay{};      ///< Before it begins.
  Duration per_block{};  ///< 0: unknown; then every block that can be fetched is.

  [[nodiscard]] bool is_known() const noexcept { return per_block > Duration::zero(); }
  [[nodiscard]] Duration of(std::size_t blocks) const noexcept {
    return delay + per_block * static_cast<Duration::rep>(blocks);
  }
};

/// The predicted time until blocks arrive. 0: unknown.
struct Arrival {
  Duration first{};
  Duration last{};
};

/// One owner that blocks are read from: its rate while it was read from, the bytes that are
/// requested and have not arrived, and whether it still responds. Reads from one owner are served
/// in the order of their requests, so a position in the sequence of all requested bytes tells how
/// much precedes it. Thread-bound.
class SourceRate {
 public:
  /// After this much time of reading, older reads count half.
  static constexpr Duration kWindow = std::chrono::milliseconds(150);
  /// The age at which a rate no longer proves that an owner is slow: the owner is probed, and the
  /// probe's rate replaces it.
  static constexpr Duration kBelieved = std::chrono::seconds(10);
  /// Round trip on the lane, from the response to a claim to the first byte.
  static constexpr Duration kLatency = std::chrono::microseconds(500);
  /// How much longer than expected a response may take before the owner counts as stuck.
  static constexpr Duration kSlack = std::chrono::milliseconds(6);
  /// The expected time of a response while the rate is unknown.
  static constexpr Duration kUnmeasured = std::chrono::milliseconds(8);

  /// Bytes that are queued while it lives.
  class Queued {
   public:
    Queued(std::shared_ptr<SourceRate> source, std::uint64_t bytes)
        : source_(std::move(source)), bytes_(bytes) {
      end_ = source_->requested_ += bytes_;
    }
    ~Queued() { source_->over_ += bytes_; }
    Queued(const Queued&) = delete;
    Queued& operator=(const Queued&) = delete;
    /// The position behind its last byte.
    [[nodiscard]] std::uint64_t end() const noexcept { return end_; }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

   private:
    std::shared_ptr<SourceRate> source_;
    std::uint64_t bytes_;
    std::uint64_t end_;
  };

  /// Bytes that are about to be queued. Predictions count them.
  class Reserved {
   public:
    Reserved(std::shared_ptr<SourceRate> source, std::uint64_t bytes)
        : source_(std::move(source)), bytes_(bytes) {
      source_->reserved_ += bytes_;
    }
    ~Reserved() { source_->reserved_ -= bytes_; }
    Reserved(const Reserved&) = delete;
    Reserved& operator=(const Reserved&) = delete;
    /// This many of them are queued now.
    void queued(std::uint64_t bytes) {
      const std::uint64_t less = std::min(bytes, bytes_);
      bytes_ -= less;
      source_->reserved_ -= less;
    }

   private:
    std::shared_ptr<SourceRate> source_;
    std::uint64_t bytes_;
  };

  /// `bytes` that were requested at `since` have arrived. Reads overlap: each counts from the end
  /// of the one before it.
  void arrived(std::uint64_t bytes, TimePoint since, TimePoint now) {
    const Duration took = now - std::max(since, last_end_);
    if (!is_fresh(since)) bytes_ = seconds_ = 0;
    last_end_ = now;
    moved_at_ = now;
    bytes_ += static_cast<double>(bytes);
    seconds_ += std::max(1e-9, std::chrono::duration<double>(took).count());
    if (seconds_ > std::chrono::duration<double>(kWindow).count()) {
      bytes_ /= 2;
      seconds_ /= 2;
    }
  }

  /// Takes the rate that the owner reports, unless one was measured lately.
  void take_reported(std::uint64_t bytes_per_second, TimePoint now) {
    constexpr double kShort = 1e-3;  // The first read replaces it.
    if (is_fresh(now) || bytes_per_second == 0) return;
    bytes_ = static_cast<double>(bytes_per_second) * kShort;
    seconds_ = kShort;
  }

  /// A read of `bytes` was handed to the fabric. The numbers of reads ascend.
  void read_began(std::uint64_t number, std::uint64_t bytes, TimePoint now) {
    if (reads_.empty()) moved_at_ = now;
    reads_.emplace(number, bytes);
    read_bytes_ += bytes;
  }
  /// It completed, with whatever result.
  void read_ended(std::uint64_t number) {
    const auto read = reads_.find(number);
    read_bytes_ -= read->second;
    reads_.erase(read);
  }
  /// A confirmation of a lease was requested; returns a number for confirm_ended().
  std::uint64_t confirm_began(TimePoint now) {
    confirms_.emplace(++last_confirm_, now);
    return last_confirm_;
  }
  void confirm_ended(std::uint64_t number) { confirms_.erase(number); }

  [[nodiscard]] std::size_t reads() const noexcept { return reads_.size(); }
  [[nodiscard]] std::uint64_t read_bytes() const noexcept { return read_bytes_; }

  /// When the owner counts as stuck, unless it responds by then; TimePoint::max(): nothing is due.
  [[nodiscard]] TimePoint stuck_at() const {
    TimePoint at = TimePoint::max();
    // A confirmation arrives behind the bytes that are in flight on the same route.
    if (!confirms_.empty()) at = confirms_.begin()->second + kSlack + expected(read_bytes_) * 3 / 2;
    if (reads_.empty()) return at;
    return std::min(at, moved_at_ + kSlack + expected(reads_.begin()->second) * 3 / 2);
  }

  [[nodiscard]] bool is_known() const noexcept { return seconds_ > 0; }
  /// The end of the last read; meaningless while the rate is unknown.
  [[nodiscard]] TimePoint measured_at() const noexcept { return last_end_; }
  [[nodiscard]] bool is_fresh(TimePoint now) const noexcept {
    return is_known() && now - last_end_ < kBelieved;
  }
  /// 0 while it is unknown.
  [[nodiscard]] double bytes_per_second() const noexcept {
    return is_known() ? bytes_ / seconds_ : 0.0;
  }
  [[nodiscard]] std::uint64_t queued_bytes() const noexcept {
    return requested_ - over_ + reserved_;
  }
  /// The bytes that arrive in `time`; `most` while the rate is unknown.
  [[nodiscard]] std::uint64_t bytes_within(Duration time, std::uint64_t most) const {
    if (!is_known()) return most;
    const double bytes = bytes_per_second() * std::chrono::duration<double>(time).count();
    return bytes < static_cast<double>(most) ? static_cast<std::uint64_t>(bytes) : most;
  }

  /// Predicts when `bytes` arrive that are requested now, and when their first `batch` has arrived.
  [[nodiscard]] Arrival predict(std::uint64_t bytes, std::uint64_t batch) const {
    if (!is_known()) return {};
    return {.first = time_of(queued_bytes() + std::min(bytes, batch)),
            .last = time_of(queued_bytes() + bytes)};
  }
  /// Predicts the time until all bytes before that position have arrived. 0: unknown.
  [[nodiscard]] Duration until(std::uint64_t position) const {
    return !is_known() || position <= over_ ? Duration::zero() : time_of(position - over_);
  }

 private:
  [[nodiscard]] Duration time_of(std::uint64_t bytes) const {
    return kLatency + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(
                          static_cast<double>(bytes) / bytes_per_second()));
  }
  [[nodiscard]] Duration expected(std::uint64_t bytes) const {
    return is_known() ? time_of(bytes) : kUnmeasured;
  }

  double bytes_ = 0;
  double seconds_ = 0;
  TimePoint last_end_{};
  TimePoint moved_at_{};         ///< When bytes arrived last, or a read began while none was.
  std::uint64_t requested_ = 0;  ///< Bytes, since the start.
  std::uint64_t over_ = 0;       ///< Bytes of `requested_` that arrived or were given up.
  std::uint64_t reserved_ = 0;
  std::map<std::uint64_t, std::uint64_t> reads_;  ///< Bytes of reads at the fabric, by number.
  std::uint64_t read_bytes_ = 0;                  ///< The sum of `reads_`.
  std::map<std::uint64_t, TimePoint> confirms_;   ///< In flight, the oldest first.
  std::uint64_t last_confirm_ = 0;
};

}  // namespace pegaflow::cluster
