#pragma once
/// \file
/// The keys of blocks of each kind, from the keys of a prompt's units.

#include <cstddef>
#include <span>
#include <vector>

#include "base/block_key.h"
#include "engine/kinds/block_kinds.h"

namespace pegaflow::engine {

/// The keys of a prompt's units, from which the blocks of each kind have theirs. Both outlive it.
class UnitKeys {
 public:
  UnitKeys(const BlockKinds& rules, std::span<const BlockKey> units)
      : rules_(rules), units_(units) {}

  /// The number of units.
  [[nodiscard]] std::size_t size() const noexcept { return units_.size(); }
  /// The key of a block.
  [[nodiscard]] const BlockKey& of(std::size_t kind, std::size_t block) const {
    return units_[rules_.key_of(rules_.kinds[kind], block)];
  }
  /// The keys of consecutive blocks of a kind. Uses `scratch` where blocks are longer than units.
  [[nodiscard]] std::span<const BlockKey> of(std::size_t kind, const BlockRange& range,
                                             std::vector<BlockKey>& scratch) const {
    if (rules_.kinds[kind].block_tokens == rules_.unit_tokens) {
      return units_.subspan(range.first, range.count);
    }
    scratch.clear();
    for (std::size_t block = range.first; block < range.end(); ++block) {
      scratch.push_back(of(kind, block));
    }
    return scratch;
  }

 private:
  const BlockKinds& rules_;
  std::span<const BlockKey> units_;
};

}  // namespace pegaflow::engine
