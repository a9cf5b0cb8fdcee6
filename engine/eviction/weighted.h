#pragma once
/// \file
/// A block that was used n times may stay n^k times as long, and k adapts to the blocks that
/// return.

#include <array>
#include <cstdint>

#include "engine/eviction/eviction.h"

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
  static Result<std::unique_ptr<EvictionPolicy>> create(BlockRows& rows, std::uint32_t row_count);

  void sealed(std::uint32_t row, std::uint32_t hash) override;
  /// Keeps its uses and its age. The memory of evicted blocks ended with the former process.
  void adopted(std::uint32_t row, std::uint32_t hash, std::uint32_t note) override;
  void taken(std::uint32_t row) override;
  void used_again(std::uint32_t row) override;
  void released(std::uint32_t row) override;
  void freed(std::uint32_t row, std::uint32_t hash, Freed why) override;
  [[nodiscard]] std::uint32_t victim() override;
  void next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const override;
  [[nodiscard]] std::uint32_t size() const override { return evictable_; }
  [[nodiscard]] Result<void> check(
      const std::function<bool(std::uint32_t)>& is_evictable) const override;

  static constexpr std::uint32_t kMaxUses = 8;
  static constexpr double kLeastExponent = 0.25;
  static constexpr double kMostExponent = 2;
  [[nodiscard]] double exponent() const noexcept { return exponent_; }

 private:
  WeightedLruPolicy(BlockRows& rows, EvictedBlocks evicted);
  /// The number of uses whose oldest row is evicted next, or 0.
  [[nodiscard]] std::uint32_t next_uses() const;
  void came_back(const EvictedBlocks::Found& found);
  void adapt();
  void set_exponent(double exponent);

  /// One for blocks used once, one for all others; halved at each step, so that it adapts.
  struct Worth {
    double returned = 0;  ///< Returned soon.
    double evicted = 0;
    double idle = 0;  ///< Sum of the ages of the evicted blocks.
    [[nodiscard]] double age() const { return evicted > 0 ? idle / evicted : 0; }
    [[nodiscard]] double per_tick() const { return idle > 0 ? returned / idle : 0; }
  };

  std::array<IndexList<&Block::place>, kMaxUses + 1> lists_;  ///< By uses; oldest first.
  std::array<double, kMaxUses + 1> weights_{};                ///< uses^-k
  std::uint32_t evictable_ = 0;
  std::uint32_t known_ = 0;
  double exponent_ = 0;
  std::array<Worth, 2> worth_;
  std::uint32_t evictions_ = 0;     ///< Since the last step.
  std::uint32_t uses_at_step_ = 0;  ///< BlockRows::uses() then.
  double ticks_per_eviction_ = 1;   ///< Between the last two steps.
};

}  // namespace pegaflow::engine
