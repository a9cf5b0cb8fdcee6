#include "engine/eviction/adaptive.h"

#include <algorithm>
#include <utility>

namespace pegaflow::engine {

namespace {

constexpr std::uint64_t kLeastMemory = 65536;  ///< Evicted blocks; 256 KiB.
constexpr std::uint64_t kMemoryPerRow = 2;     ///< 8 bytes a row.

}  // namespace

Result<std::unique_ptr<EvictionPolicy>> AdaptivePolicy::create(BlockRows& rows,
                                                               std::uint32_t row_count,
                                                               PolicyMemory memory) {
  const std::uint64_t remembered =
      row_count == 0 ? 0 : std::max(kLeastMemory, kMemoryPerRow * row_count);
  PEGA_TRY_LET(auto evicted, EvictedBlocks::create(remembered, memory));
  PEGA_TRY_LET(auto contest, Contest::create(row_count, memory));
  return std::unique_ptr<EvictionPolicy>(
      new AdaptivePolicy(rows, std::move(evicted), std::move(contest)));
}

AdaptivePolicy::AdaptivePolicy(BlockRows& rows, EvictedBlocks evicted, Contest contest)
    : EvictionPolicy(rows, std::move(evicted)), contest_(std::move(contest)) {
  rule_ = contest_.followed();  // best(false) would forget a rule that refuses.
  lists_.set_exponent(rule_.exponent());
}

// ---- groups

void AdaptivePolicy::begin(Group group) {
  if (group == group_) return;
  end_group();
  group_ = group;
  now_ = rows_.uses();
}

void AdaptivePolicy::request(std::uint32_t hash) {
  requested_.push_back(hash);
  if (requested_.size() < Contest::kMostOfGroup) return;
  const Group group = group_;
  end_group();
  group_ = group;
}

void AdaptivePolicy::end_group() {
  if (group_ == Group::kSealed) std::reverse(requested_.begin(), requested_.end());
  if (!requested_.empty()) contest_.use(requested_, now_);
  requested_.clear();
  group_ = Group::kNone;
}

// ---- rows

void AdaptivePolicy::add_row(std::uint32_t row, std::uint32_t hash, std::uint32_t uses) {
  rows_[row].note = uses & kNoteMask;
  if (contest_.samples(hash)) {
    rows_[row].note = (kSampled + uses) & kNoteMask;
    sampled_.emplace(row, hash);
  }
  ++known_;
}

void AdaptivePolicy::sealed(std::uint32_t row, std::uint32_t hash) {
  begin(Group::kSealed);
  const auto found = evicted_->take(hash);
  add_row(row, hash, std::min((found ? found->uses : 0) + 1, kMaxUses));
  if (is_sampled(row)) request(hash);
  rows_.stamp(row);
  lists_.push_back(rows_, row, uses_of(row));
}

void AdaptivePolicy::adopted(std::uint32_t row, std::uint32_t hash, std::uint32_t note) {
  end_group();
  add_row(row, hash, std::clamp(note & ~kSampled, std::uint32_t{1}, kMaxUses));
  // The former process may have died before it set the age.
  if (!lists_.may_follow(rows_, row, uses_of(row))) return released(row);
  lists_.push_back(rows_, row, uses_of(row));
}

void AdaptivePolicy::taken(std::uint32_t row) {
  lists_.erase(rows_, row, uses_of(row));
  used_again(row);
}

void AdaptivePolicy::used_again(std::uint32_t row) {
  begin(Group::kClaim);
  if (is_sampled(row)) request(sampled_.at(row));
  if (uses_of(row) < kMaxUses) ++rows_[row].note;
}

void AdaptivePolicy::released(std::uint32_t row) {
  end_group();
  rows_.stamp(row);
  lists_.push_back(rows_, row, uses_of(row));
}

void AdaptivePolicy::freed(std::uint32_t row, std::uint32_t hash, Freed why) {
  const std::uint32_t uses = uses_of(row);
  lists_.erase(rows_, row, uses);
  if (is_sampled(row)) sampled_.erase(row);
  rows_[row].note = 0;
  --known_;
  if (why != Freed::kEvicted) return;
  was_full_ = true;
  evicted_->add(hash, uses);
}

// ---- saves

void AdaptivePolicy::let_time_pass() {
  rows_.pass(refused_);
  refused_ = 0;
}

void AdaptivePolicy::claim_begins() {
  end_group();
  let_time_pass();
}

void AdaptivePolicy::save_begins(bool may_refuse) {
  end_group();
  let_time_pass();
  pool_ = std::max(known_, 1U);
  if (was_full_) contest_.resize(pool_);
  rule_ = contest_.best(may_refuse);
  if (rule_.exponent() != lists_.exponent()) lists_.set_exponent(rule_.exponent());
}

bool AdaptivePolicy::refuses(std::uint32_t hash) {
  if (!rule_.may_refuse()) return false;
  const auto found = evicted_->look(hash);
  const std::uint32_t uses = std::min((found ? found->uses : 0) + 1, kMaxUses);
  if (!rule_.refuses(uses, lists_.oldest(rows_).age, pool_)) return false;
  ++refused_;
  begin(Group::kRefused);
  evicted_->take(hash);
  evicted_->add(hash, uses);
  if (contest_.samples(hash)) request(hash);
  return true;
}

Result<void> AdaptivePolicy::check(const std::function<bool(std::uint32_t)>& is_evictable) const {
  if (size() > known_) return fail(Errc::kInternal, "{} of {} rows are listed", size(), known_);
  return lists_.check(
      rows_, [this](std::uint32_t row) { return uses_of(row); }, is_evictable);
}

}  // namespace pegaflow::engine
