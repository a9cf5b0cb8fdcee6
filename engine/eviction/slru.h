#pragma once
/// \file
/// Segmented LRU: a fifth of the rows is kept for blocks that were used again.

#include <cstdint>

#include "engine/eviction/eviction.h"

namespace pegaflow::engine {

/// After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (1994).
/// New blocks are evicted before those that were claimed since they were saved. At most a fifth of
/// all rows stays protected; the protected rows used longest ago return to the new ones.
class SlruPolicy final : public EvictionPolicy {
 public:
  explicit SlruPolicy(BlockRows& rows) : EvictionPolicy(rows) {}

  void sealed(std::uint32_t row, std::uint32_t hash) override;
  void taken(std::uint32_t row) override;
  void used_again(std::uint32_t row) override { rows_[row].note = kProtected; }
  void released(std::uint32_t row) override;
  void freed(std::uint32_t row, std::uint32_t hash, Freed why) override;
  [[nodiscard]] std::uint32_t victim() override;
  void next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const override;
  [[nodiscard]] std::uint32_t size() const override { return new_.size() + protected_.size(); }
  [[nodiscard]] Result<void> check(
      const std::function<bool(std::uint32_t)>& is_evictable) const override;

 private:
  using List = IndexList<&Block::place>;
  static constexpr std::uint32_t kProtected = 1;  ///< Block::note
  [[nodiscard]] List& list(std::uint32_t row) {
    return rows_[row].note == kProtected ? protected_ : new_;
  }

  List new_;  ///< Oldest first, like protected_.
  List protected_;
  std::uint32_t known_ = 0;
};

}  // namespace pegaflow::engine
