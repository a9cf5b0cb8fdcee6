#pragma once
/// \file
/// S3-FIFO: new blocks pass through a small queue, and only those used there enter the large one.

#include <cstdint>

#include "engine/eviction/eviction.h"

namespace pegaflow::engine {

/// After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): a tenth of the
/// rows for new blocks, a memory of as many evicted blocks as the large queue holds, use counts up
/// to 3.
///
/// Rows stay in their queue while they are taken, and are skipped: with nearly all rows taken a
/// victim costs a walk.
class S3FifoPolicy final : public EvictionPolicy {
 public:
  /// Errors: kOutOfCapacity.
  static Result<std::unique_ptr<EvictionPolicy>> create(BlockRows& rows, std::uint32_t row_count,
                                                        PolicyMemory memory = {});

  void sealed(std::uint32_t row, std::uint32_t hash) override;
  void taken(std::uint32_t row) override;
  void used_again(std::uint32_t row) override;
  void released(std::uint32_t row) override;
  void freed(std::uint32_t row, std::uint32_t hash, Freed why) override;
  [[nodiscard]] std::uint32_t victim() override;
  void next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const override;
  [[nodiscard]] std::uint32_t size() const override { return evictable_; }
  [[nodiscard]] Result<void> check(
      const std::function<bool(std::uint32_t)>& is_evictable) const override;

 private:
  using Queue = IndexList<&Block::place>;
  // Block::note: the count, and these flags.
  static constexpr std::uint32_t kCount = 3;
  static constexpr std::uint32_t kInMain = 4;
  static constexpr std::uint32_t kTaken = 8;

  S3FifoPolicy(BlockRows& rows, EvictedBlocks evicted) : EvictionPolicy(rows, std::move(evicted)) {}
  [[nodiscard]] bool small_is_due() const noexcept;
  void count(std::uint32_t row, std::uint32_t by) noexcept;

  Queue small_;
  Queue main_;
  std::uint32_t evictable_ = 0;
  std::uint32_t main_evictable_ = 0;  ///< The part of evictable_ in the large queue.
};

}  // namespace pegaflow::engine
