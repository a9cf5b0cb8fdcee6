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
                                                                  std::uint32_t row_count,
                                                                  PolicyMemory memory) {
  // Without rows: a pool without a shape.
  const std::uint64_t remembered =
      row_count == 0 ? 0 : std::max(kLeastMemory, kMemoryPerRow * row_count);
  PEGA_TRY_LET(auto evicted, EvictedBlocks::create(remembered, memory));
  PEGA_TRY_LET(auto learned, memory.take<Learned>(1));
  return std::unique_ptr<EvictionPolicy>(
      new WeightedLruPolicy(rows, std::move(evicted), std::move(learned)));
}

WeightedLruPolicy::WeightedLruPolicy(BlockRows& rows, EvictedBlocks evicted,
                                     ZeroPages<Learned> learned)
    : EvictionPolicy(rows, std::move(evicted)), learned_(std::move(learned)) {
  if (!this->learned().is_plausible()) {
    this->learned() = {.exponent = 1,
                       .worth = {},
                       .ticks_per_eviction = 1,
                       .evictions = 0,
                       .uses_at_step = rows.uses()};
  }
  lists_.set_exponent(this->learned().exponent);
}

bool WeightedLruPolicy::Learned::is_plausible() const noexcept {
  const auto is_sum = [](double value) { return value >= 0 && std::isfinite(value); };
  return exponent >= kLeastExponent && exponent <= kMostExponent && is_sum(ticks_per_eviction) &&
         std::all_of(worth.begin(), worth.end(), [&](const Worth& each) {
           return is_sum(each.returned) && is_sum(each.evicted) && is_sum(each.idle);
         });
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
  // The former process may have died before it set the age.
  if (!lists_.may_follow(rows_, row, uses)) return released(row);
  lists_.push_back(rows_, row, uses);
}

void WeightedLruPolicy::taken(std::uint32_t row) {
  lists_.erase(rows_, row, rows_[row].note);
  used_again(row);
}

void WeightedLruPolicy::used_again(std::uint32_t row) {
  if (rows_[row].note < kMaxUses) ++rows_[row].note;
}

void WeightedLruPolicy::released(std::uint32_t row) {
  rows_.stamp(row);
  lists_.push_back(rows_, row, rows_[row].note);
}

void WeightedLruPolicy::freed(std::uint32_t row, std::uint32_t hash, Freed why) {
  const std::uint32_t uses = rows_[row].note;
  const double age = rows_.age(row) + 1.0;
  lists_.erase(rows_, row, uses);
  rows_[row].note = 0;
  --known_;
  if (why != Freed::kEvicted) return;
  evicted_->add(hash, uses);
  Worth& worth = learned().worth[uses > 1 ? 1 : 0];
  worth.evicted += 1;
  worth.idle += age;
  if (++learned().evictions >= std::max(known_ / kStepsPerFill, kLeastStep)) adapt();
}

void WeightedLruPolicy::came_back(const EvictedBlocks::Found& found) {
  Worth& worth = learned().worth[found.uses > 1 ? 1 : 0];
  const double missed_by =
      static_cast<double>(found.evictions_since) * learned().ticks_per_eviction;
  if (missed_by < worth.age()) worth.returned += 1;
}

void WeightedLruPolicy::adapt() {
  Learned& learned = this->learned();
  const double once = learned.worth[0].per_tick();
  const double more = learned.worth[1].per_tick();
  if (once + more > 0 && std::isfinite(once + more)) {
    lists_.set_exponent(std::clamp(exponent() + kGain * (more - once) / (more + once),
                                   kLeastExponent, kMostExponent));
    learned.exponent = exponent();
  }
  for (Worth& worth : learned.worth) {
    worth.returned /= 2;
    worth.evicted /= 2;
    worth.idle /= 2;
  }
  learned.ticks_per_eviction =
      static_cast<double>(rows_.uses() - learned.uses_at_step) / learned.evictions;
  learned.uses_at_step = rows_.uses();
  learned.evictions = 0;
}

Result<void> WeightedLruPolicy::check(
    const std::function<bool(std::uint32_t)>& is_evictable) const {
  if (size() > known_) return fail(Errc::kInternal, "{} of {} rows are listed", size(), known_);
  const auto uses_of = [this](std::uint32_t row) { return std::uint32_t{rows_[row].note}; };
  return lists_.check(rows_, uses_of, is_evictable);
}

}  // namespace pegaflow::engine
