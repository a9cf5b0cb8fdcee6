#pragma once
/// \file
/// A block that was used n times may stay n^k times as long, and k adapts to the blocks that
/// return.

#include <array>
#include <cstdint>

#include "engine/eviction/eviction.h"
#include "engine/eviction/use_lists.h"

namespace pegaflow::engine {

/// LRU weighted by use. docs/decisions/0006 has the evidence.
///
/// Takes the oldest evictable block for each number of uses (1 to 8 and more), and evicts the one
/// whose age divided by uses^k is the largest. The uses of an evicted block are remembered (two
/// entries per row, and at least 65,536: a small pool needs a memory that is long compared with its
/// own), so that a block that returns again and again is recognized though it never stayed.
///
/// Every use of a block is also a use of its parent, so a parent has at least the uses and at most
/// the age of its children: chains are evicted from their ends for any k.
///
/// k lies between 1/4, which is almost LRU, and 2, and starts at 1. The policy measures the benefit
/// of a longer stay: the count of blocks that return after no more evictions than they had been
/// evictable for, per tick that they had been evictable, for blocks used once and for all others.
/// After every quarter of the rows evicted, k moves towards the group with the greater benefit.
class WeightedLruPolicy final : public EvictionPolicy {
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
  [[nodiscard]] std::uint32_t victim() override { return lists_.oldest(rows_).row; }
  void next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const override {
    lists_.next(rows_, most, rows);
  }
  [[nodiscard]] std::uint32_t size() const override { return lists_.size(); }
  [[nodiscard]] Result<void> check(
      const std::function<bool(std::uint32_t)>& is_evictable) const override;

  static constexpr std::uint32_t kMaxUses = UseLists::kMaxUses;
  static constexpr double kLeastExponent = 0.25;
  static constexpr double kMostExponent = 2;
  [[nodiscard]] double exponent() const noexcept { return lists_.exponent(); }

 private:
  struct Learned;
  WeightedLruPolicy(BlockRows& rows, EvictedBlocks evicted, ZeroPages<Learned> learned);
  void came_back(const EvictedBlocks::Found& found);
  void adapt();

  /// One for blocks used once, one for all others; halved at each step, so that it adapts.
  struct Worth {
    double returned = 0;  ///< Returned soon.
    double evicted = 0;
    double idle = 0;  ///< Sum of the ages of the evicted blocks.
    [[nodiscard]] double age() const { return evicted > 0 ? idle / evicted : 0; }
    [[nodiscard]] double per_tick() const { return idle > 0 ? returned / idle : 0; }
  };

  /// The policy's conclusions, which may outlive the process. Each member is right by itself.
  struct Learned {
    double exponent = 0;  ///< 0: nothing was learned.
    std::array<Worth, 2> worth;
    double ticks_per_eviction = 0;   ///< Between the last two steps.
    std::uint32_t evictions = 0;     ///< Since the last step.
    std::uint32_t uses_at_step = 0;  ///< BlockRows::uses() then.
    [[nodiscard]] bool is_plausible() const noexcept;
  };
  [[nodiscard]] Learned& learned() noexcept { return learned_[0]; }

  UseLists lists_;
  std::uint32_t known_ = 0;
  ZeroPages<Learned> learned_;  ///< One.
};

}  // namespace pegaflow::engine
