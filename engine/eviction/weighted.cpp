#include "engine/eviction/weighted.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace pegaflow::engine {

namespace {

constexpr std::uint64_t kLeastMemory = 65536;  ///< Evicted blocks; 256 KiB.
constexpr std::uint64_t kMemoryPerRow = 2;     ///< 8 bytes a row.
/// A step is long enough for a few returns, and short compared with the life of the pool's content.
constexpr std::uint32_t kLeastStep = 256;
constexpr std::uint32_t kStepsPerFill = 4;
/// The most that k moves in one step. Between 0.1 and 0.5 the hit rates are the same.
constexpr double kGain = 0.25;

}  // namespace

Result<std::unique_ptr<EvictionPolicy>> WeightedLruPolicy::create(BlockRows& rows,
                                                                  std::uint32_t row_count) {
  if (row_count == 0) {  // A pool without a shape.
    PEGA_TRY_LET(auto none, EvictedBlocks::create(0));
    return std::unique_ptr<EvictionPolicy>(new WeightedLruPolicy(rows, std::move(none)));
  }
  PEGA_TRY_LET(auto evicted,
               EvictedBlocks::create(std::max(kLeastMemory, kMemoryPerRow * row_count)));
  return std::unique_ptr<EvictionPolicy>(new WeightedLruPolicy(rows, std::move(evicted)));
}

WeightedLruPolicy::WeightedLruPolicy(BlockRows& rows, EvictedBlocks evicted)
    : EvictionPolicy(rows, std::move(evicted)), uses_at_step_(rows.uses()) {
  set_exponent(1);
}

void WeightedLruPolicy::set_exponent(double exponent) {
  exponent_ = exponent;
  for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) weights_[uses] = std::pow(uses, -exponent);
}

void WeightedLruPolicy::sealed(std::uint32_t row, std::uint32_t hash) {
  std::uint32_t uses = 1;
  if (const auto found = evicted_->take(hash)) {
    came_back(*found);
    uses = std::min(found->uses + 1, kMaxUses);
  }
  rows_[row].note = uses & kNoteMask;
  ++known_;
  released(row);
}

void WeightedLruPolicy::adopted(std::uint32_t row, std::uint32_t /*hash*/, std::uint32_t note) {
  const std::uint32_t uses = std::clamp(note, std::uint32_t{1}, kMaxUses);
  rows_[row].note = uses & kNoteMask;
  ++known_;
  const std::uint32_t last = lists_[uses].back();
  // A list has decreasing ages; the former process may have died before it set this one.
  if (last != kNone && rows_.age(row) >= rows_.age(last)) return released(row);
  lists_[uses].push_back(rows_, row);
  ++evictable_;
}

void WeightedLruPolicy::taken(std::uint32_t row) {
  lists_[rows_[row].note].erase(rows_, row);
  --evictable_;
  used_again(row);
}

void WeightedLruPolicy::used_again(std::uint32_t row) {
  if (rows_[row].note < kMaxUses) ++rows_[row].note;
}

void WeightedLruPolicy::released(std::uint32_t row) {
  rows_.stamp(row);
  lists_[rows_[row].note].push_back(rows_, row);
  ++evictable_;
}

void WeightedLruPolicy::freed(std::uint32_t row, std::uint32_t hash, Freed why) {
  const std::uint32_t uses = rows_[row].note;
  const double age = rows_.age(row) + 1.0;
  lists_[uses].erase(rows_, row);
  rows_[row].note = 0;
  --evictable_;
  --known_;
  if (why != Freed::kEvicted) return;
  evicted_->add(hash, uses);
  Worth& worth = worth_[uses > 1 ? 1 : 0];
  worth.evicted += 1;
  worth.idle += age;
  if (++evictions_ >= std::max(known_ / kStepsPerFill, kLeastStep)) adapt();
}

void WeightedLruPolicy::came_back(const EvictedBlocks::Found& found) {
  Worth& worth = worth_[found.uses > 1 ? 1 : 0];
  const double missed_by = static_cast<double>(found.evictions_since) * ticks_per_eviction_;
  if (missed_by < worth.age()) worth.returned += 1;
}

void WeightedLruPolicy::adapt() {
  const double once = worth_[0].per_tick();
  const double more = worth_[1].per_tick();
  if (once + more > 0) {
    set_exponent(std::clamp(exponent_ + kGain * (more - once) / (more + once), kLeastExponent,
                            kMostExponent));
  }
  for (Worth& worth : worth_) {
    worth.returned /= 2;
    worth.evicted /= 2;
    worth.idle /= 2;
  }
  ticks_per_eviction_ = static_cast<double>(rows_.uses() - uses_at_step_) / evictions_;
  uses_at_step_ = rows_.uses();
  evictions_ = 0;
}

std::uint32_t WeightedLruPolicy::next_uses() const {
  std::uint32_t best = 0;
  double most = 0;
  for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) {
    if (lists_[uses].is_empty()) continue;
    const double age = (rows_.age(lists_[uses].front()) + 1.0) * weights_[uses];
    if (age <= most) continue;
    most = age;
    best = uses;
  }
  return best;
}

std::uint32_t WeightedLruPolicy::victim() {
  const std::uint32_t uses = next_uses();
  return uses == 0 ? kNone : lists_[uses].front();
}

void WeightedLruPolicy::next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const {
  std::array<std::uint32_t, kMaxUses + 1> next{};
  for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) next[uses] = lists_[uses].front();
  for (; most != 0; --most) {
    std::uint32_t best = 0;
    double oldest = 0;
    for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) {
      if (next[uses] == kNone) continue;
      const double age = (rows_.age(next[uses]) + 1.0) * weights_[uses];
      if (age <= oldest) continue;
      oldest = age;
      best = uses;
    }
    if (best == 0) return;
    rows.push_back(next[best]);
    next[best] = lists_[best].next(rows_, next[best]);
  }
}

Result<void> WeightedLruPolicy::check(
    const std::function<bool(std::uint32_t)>& is_evictable) const {
  std::uint32_t listed = 0;
  for (std::uint32_t uses = 1; uses <= kMaxUses; ++uses) {
    const auto& list = lists_[uses];
    for (std::uint32_t row = list.front(); row != kNone; row = list.next(rows_, row)) {
      if (!is_evictable(row) || ++listed > evictable_) {
        return fail(Errc::kInternal, "row {} is listed as evictable and is not", row);
      }
      if (rows_[row].note != uses) {
        return fail(Errc::kInternal, "row {} has {} uses and is listed under {}", row,
                    std::uint32_t{rows_[row].note}, uses);
      }
      const std::uint32_t next = list.next(rows_, row);
      if (next != kNone && rows_.age(next) >= rows_.age(row)) {
        return fail(Errc::kInternal, "row {} is older than the one before it", next);
      }
    }
  }
  if (listed != evictable_ || evictable_ > known_) {
    return fail(Errc::kInternal, "{} rows are listed, {} counted, {} known", listed, evictable_,
                known_);
  }
  return {};
}

}  // namespace pegaflow::engine
