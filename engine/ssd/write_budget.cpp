#include "engine/ssd/write_budget.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace pegaflow::engine::ssd {
namespace {

constexpr std::uint64_t kRemembered = std::uint64_t{1} << 20;
/// The share of each rank is computed again after this time.
constexpr double kStepSeconds = 1;
/// After this time an observation counts half as much.
constexpr double kHalfLifeSeconds = 300;
/// The time in which the bucket returns to its half.
constexpr double kBalanceSeconds = 3600;
/// Blocks of one run.
constexpr double kRunBlocks = 64;

WriteBudget::Rank rank_of(const WriteBudget::Offer& offer, bool came_back) {
  if (offer.was_used) return 0;
  const Depth depth = offer.depth == kUnknownDepth ? kMostDepth : offer.depth;
  return static_cast<WriteBudget::Rank>(came_back ? depth : depth + kMostDepth);
}

}  // namespace

WriteBudget::WriteBudget(std::uint64_t bytes_per_day, TimePoint now)
    : rate_(static_cast<double>(bytes_per_day) / 86400.0),
      tokens_(burst() / 2),
      filled_at_(now),
      adjusted_at_(now) {
  if (bytes_per_day == 0) return;
  if (auto rejected = EvictedBlocks::create(kRemembered)) rejected_ = std::move(*rejected);
}

bool WriteBudget::take(const Offer& offer, TimePoint now) {
  if (rate_ == 0) return true;
  fill(now);
  const auto name = static_cast<std::uint32_t>(offer.key.hash());
  const bool was_rejected = rejected_ && rejected_->take(name).has_value();
  const Rank rank = rank_of(offer, offer.came_back || was_rejected);
  const auto bytes = static_cast<double>(offer.bytes);
  offered_[rank] += bytes;
  if (is_wanted(rank) && tokens_ >= bytes) {
    tokens_ -= bytes;
    return true;
  }
  if (rejected_) rejected_->add(name, 1);
  return false;
}

bool WriteBudget::take_last(std::uint64_t bytes, TimePoint now) {
  if (rate_ == 0) return true;
  fill(now);
  if (tokens_ < static_cast<double>(bytes)) return false;
  tokens_ -= static_cast<double>(bytes);
  return true;
}

bool WriteBudget::is_wanted(Rank rank) {
  if (rank != limit_) return rank < limit_;
  credit_ += share_;
  if (credit_ >= kRunBlocks) is_in_run_ = true;
  if (credit_ < 1) is_in_run_ = false;
  if (is_in_run_) credit_ -= 1;
  return is_in_run_;
}

void WriteBudget::fill(TimePoint now) {
  const auto seconds = [now](TimePoint from) {
    return std::max(0.0, std::chrono::duration<double>(now - from).count());
  };
  tokens_ = std::min(burst(), tokens_ + rate_ * seconds(filled_at_));
  filled_at_ = now;
  if (const double since = seconds(adjusted_at_); since >= kStepSeconds) {
    adjusted_at_ = now;
    adjust(since);
  }
}

void WriteBudget::adjust(double seconds) {
  observed_s_ += seconds;
  const double allowed = std::max(0.0, rate_ + (tokens_ - burst() / 2) / kBalanceSeconds);
  double sum = 0;
  const Rank before = limit_;
  limit_ = kRanks;
  share_ = 1;
  for (Rank rank = 0; rank < kRanks; ++rank) {
    const double offered = offered_[rank] / observed_s_;
    if (sum + offered > allowed) {
      limit_ = rank;
      share_ = std::max(0.0, (allowed - sum) / offered);
      break;
    }
    sum += offered;
  }
  if (limit_ != before) {
    is_in_run_ = share_ > 0.5;
    credit_ = is_in_run_ ? kRunBlocks : 0;
  }
  const double kept = std::exp2(-seconds / kHalfLifeSeconds);
  observed_s_ *= kept;
  for (double& each : offered_) each *= kept;
}

}  // namespace pegaflow::engine::ssd
