#pragma once
/// \file
/// Evicts the block that has been evictable for longest, exactly.

#include "engine/eviction/eviction.h"

namespace pegaflow::engine {

/// One list, oldest first. Claims only take rows out of it; see docs/decisions/0002.
class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(BlockRows& rows) : EvictionPolicy(rows) {}

  void sealed(std::uint32_t row, std::uint32_t hash) override;
  void taken(std::uint32_t row) override;
  void used_again(std::uint32_t /*row*/) override {}
  void released(std::uint32_t row) override;
  void freed(std::uint32_t row, std::uint32_t hash, Freed why) override;
  [[nodiscard]] std::uint32_t victim() override { return evictable_.front(); }
  void next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const override;
  [[nodiscard]] std::uint32_t size() const override { return evictable_.size(); }
  [[nodiscard]] Result<void> check(
      const std::function<bool(std::uint32_t)>& is_evictable) const override;

 private:
  IndexList<&Block::place> evictable_;
};

}  // namespace pegaflow::engine
