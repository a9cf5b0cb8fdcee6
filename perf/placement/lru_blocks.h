#pragma once
/// \file
/// A cache of blocks with exact LRU, for simulated engines and pools.

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "index/key.h"

namespace pegaflow::perf {

/// Blocks in the order of their last use. The blocks of a prompt are used from its end to its
/// start, so that a prefix outlives what follows it. Thread-bound.
class LruBlocks {
 public:
  explicit LruBlocks(std::size_t capacity);

  /// Blocks from the start of `chain` that are here.
  [[nodiscard]] std::size_t prefix(std::span<const index::Key> chain) const;
  /// Blocks from the start of `chain` that were complete at `now`.
  [[nodiscard]] std::size_t complete_prefix(std::span<const index::Key> chain, double now) const;
  [[nodiscard]] bool has(index::Key key) const { return places_.contains(key); }

  /// Uses all blocks of `chain`: those that are missing enter, complete from `complete_at` on.
  /// Appends to `evicted` the blocks that leave.
  void use(std::span<const index::Key> chain, double complete_at, std::vector<index::Key>& evicted);

  [[nodiscard]] std::size_t size() const { return places_.size(); }

 private:
  struct Block {
    index::Key key = 0;
    double complete_at = 0;
    std::uint32_t older = 0;
    std::uint32_t newer = 0;
  };
  void unlink(std::uint32_t at);
  void make_newest(std::uint32_t at);

  std::vector<Block> blocks_;  ///< Block 0 closes the ring: its `newer` is the oldest.
  std::unordered_map<index::Key, std::uint32_t> places_;
  std::size_t capacity_;
};

}  // namespace pegaflow::perf
