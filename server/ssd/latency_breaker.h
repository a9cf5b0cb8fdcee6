#pragma once
/// \file
/// Stops reads from a disk that has become slow.

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace pegaflow::server {

/// Compares how long each read takes with what is usual for the disk and for the bytes that it had
/// to read until then. A read that takes ten times as long, and at least 200 ms, is slow. Opens
/// when there are four more slow reads than others, or one read takes 2 s longer than that limit.
/// Of slow reads that overlap one counts: a thread or a machine that stands still for a while makes
/// all reads in flight slow, and no disk.
///
/// While it is open the disk gets one read of kProbeBytes at a time, at first after 5 s and after
/// each slow one again; after three in a row that are not slow it closes. Thread-bound.
class LatencyBreaker {
 public:
  static constexpr std::uint64_t kProbeBytes = std::uint64_t{1} << 20;
  static constexpr double kFactor = 10;
  static constexpr double kLeastSeconds = 0.2;
  static constexpr double kHangSeconds = 2;
  static constexpr int kSlowReads = 4;
  static constexpr int kGoodProbes = 3;
  static constexpr Duration kProbeInterval = std::chrono::seconds(5);

  /// The time beyond which a read is slow, when `bytes` have to be read until its end.
  [[nodiscard]] double limit_seconds(std::uint64_t bytes) const noexcept {
    return std::max(kLeastSeconds, kFactor * usual_ * mebibytes(bytes));
  }
  /// A read has ended. Returns whether the breaker has opened.
  bool ended(TimePoint began, std::uint64_t bytes, TimePoint now) noexcept {
    if (is_open_) return false;
    const double seconds = std::chrono::duration<double>(now - began).count();
    if (seconds <= limit_seconds(bytes)) {
      slow_reads_ = std::max(0, slow_reads_ - 1);
      usual_ = std::min(kMostUsual, usual_ + (seconds / mebibytes(bytes) - usual_) / 64);
      return false;
    }
    if (began < slow_until_) return false;
    slow_until_ = now;
    if (++slow_reads_ < kSlowReads) return false;
    open(now);
    return true;
  }
  /// A read is in flight since then. Returns whether the breaker has opened.
  bool waits(Duration since, std::uint64_t bytes, TimePoint now) noexcept {
    if (is_open_) return false;
    const double seconds = std::chrono::duration<double>(since).count();
    if (seconds <= limit_seconds(bytes) + kHangSeconds) return false;
    open(now);
    return true;
  }
  [[nodiscard]] bool is_open() const noexcept { return is_open_; }

  [[nodiscard]] bool is_probe_due(TimePoint now) const noexcept {
    return is_open_ && !is_probing_ && now >= probe_at_;
  }
  void probe_began() noexcept { is_probing_ = true; }
  /// Returns whether the breaker has closed.
  bool probe_ended(bool is_read, Duration took, TimePoint now) noexcept {
    is_probing_ = false;
    const double seconds = std::chrono::duration<double>(took).count();
    if (!is_read || seconds > limit_seconds(kProbeBytes)) {
      good_probes_ = 0;
      probe_at_ = now + kProbeInterval;
      return false;
    }
    if (++good_probes_ < kGoodProbes) return false;
    is_open_ = false;
    return true;
  }

 private:
  /// Seconds for a MiB, until reads have been measured and at most: a disk that reads less than
  /// 10 MB/s with a full queue is slow in any case.
  static constexpr double kMostUsual = 0.01;
  [[nodiscard]] static double mebibytes(std::uint64_t bytes) noexcept {
    return std::max(1.0, static_cast<double>(bytes) / (1 << 20));
  }
  void open(TimePoint now) noexcept {
    is_open_ = true;
    slow_reads_ = 0;
    good_probes_ = 0;
    probe_at_ = now + kProbeInterval;
  }

  double usual_ = kMostUsual;
  int slow_reads_ = 0;
  TimePoint slow_until_ = TimePoint::min();  ///< The end of the last slow read that counted.
  bool is_open_ = false;
  bool is_probing_ = false;
  int good_probes_ = 0;
  TimePoint probe_at_{};
};

}  // namespace pegaflow::server
