#pragma once
/// \file
/// Follows the eviction rule that wins a contest, and may refuse new blocks.

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "engine/eviction/contest.h"
#include "engine/eviction/eviction.h"
#include "engine/eviction/rule.h"
#include "engine/eviction/use_lists.h"

namespace pegaflow::engine {

/// LRU weighted by use, with the weight and the patience that find the most blocks now.
/// docs/decisions/0029 has the evidence.
///
/// When the conversations in progress need more blocks than the pool has, every block is evicted
/// shortly before it would be used again. Then it is better to keep some of them: as long as the
/// next victim is younger than the patience of the rule, new blocks are refused. Which rule is the
/// best one, a Contest shows; plain LRU is among them.
///
/// The uses of evicted and refused blocks are remembered, as by weighted-lru.
class AdaptivePolicy final : public EvictionPolicy {
 public:
  /// Errors: kOutOfCapacity.
  static Result<std::unique_ptr<EvictionPolicy>> create(BlockRows& rows, std::uint32_t row_count,
                                                        PolicyMemory memory = {});

  void sealed(std::uint32_t row, std::uint32_t hash) override;
  /// Keeps its uses and its age.
  void adopted(std::uint32_t row, std::uint32_t hash, std::uint32_t note) override;
  void taken(std::uint32_t row) override;
  void used_again(std::uint32_t row) override;
  void released(std::uint32_t row) override;
  void freed(std::uint32_t row, std::uint32_t hash, Freed why) override;
  void claim_begins() override;
  void save_begins(bool may_refuse) override;
  bool refuses(std::uint32_t hash) override;
  [[nodiscard]] std::uint32_t victim() override { return lists_.oldest(rows_).row; }
  void next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const override {
    lists_.next(rows_, most, rows);
  }
  [[nodiscard]] std::uint64_t memory_bytes() const override {
    return EvictionPolicy::memory_bytes() + contest_.memory_bytes();
  }
  [[nodiscard]] std::uint32_t size() const override { return lists_.size(); }
  [[nodiscard]] Result<void> check(
      const std::function<bool(std::uint32_t)>& is_evictable) const override;

  static constexpr std::uint32_t kMaxUses = 7;
  [[nodiscard]] const EvictionRule& rule() const noexcept { return rule_; }
  [[nodiscard]] const Contest& contest() const noexcept { return contest_; }

 private:
  // Block::note: the uses, 1 to 7, and kSampled of a block that the contest samples.
  static constexpr std::uint32_t kSampled = 8;
  /// The part of a claim or a save that is in progress.
  enum class Group : std::uint8_t { kNone, kClaim, kRefused, kSealed };

  AdaptivePolicy(BlockRows& rows, EvictedBlocks evicted, Contest contest);
  [[nodiscard]] bool is_sampled(std::uint32_t row) const noexcept {
    return (rows_[row].note & kSampled) != 0;
  }
  [[nodiscard]] std::uint32_t uses_of(std::uint32_t row) const noexcept {
    return rows_[row].note & ~kSampled;
  }
  void add_row(std::uint32_t row, std::uint32_t hash, std::uint32_t uses);
  /// The contest gets the sampled names of a group once it is complete.
  void begin(Group group);
  void request(std::uint32_t hash);
  void end_group();
  /// The blocks refused by the last save count as uses from now on.
  void let_time_pass();

  UseLists lists_;
  Contest contest_;
  EvictionRule rule_;
  std::unordered_map<std::uint32_t, std::uint32_t> sampled_;  ///< The hashes of sampled rows.
  std::uint32_t known_ = 0;
  bool was_full_ = false;

  Group group_ = Group::kNone;
  std::vector<std::uint32_t> requested_;  ///< Sampled names of the group.
  std::uint32_t now_ = 0;                 ///< BlockRows::uses() when it began.

  std::uint32_t pool_ = 1;     ///< Rows when the save began: it will free some.
  std::uint32_t refused_ = 0;  ///< Since the save began.
};

}  // namespace pegaflow::engine
