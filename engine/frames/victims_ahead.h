#pragma once
/// \file
/// Prefetches what the next evictions will touch while the current ones are made.

#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/frames/block_table.h"

namespace pegaflow::engine {

/// Walks ahead along the lists that victims come from.
///
/// A list is a chain: the place of its next row is known only once the row before it has arrived.
/// So the walk stays a few rows ahead of the evictions and takes a step at each of them, instead of
/// waiting for a whole group of rows, one after the other. It only prefetches: where the list has
/// changed meanwhile, it begins again, and nothing but time is lost.
class VictimsAhead {
 public:
  /// `victim` will be evicted now; `fetch(row)` is called for sealed rows that have arrived, a few
  /// evictions ahead, to prefetch what lies elsewhere.
  template <typename Fetch>
  void step(const BlockTable& blocks, FrameIndex victim, Fetch&& fetch) {
    Walk& walk = walks_[blocks[victim].note];
    const bool is_next = walk.evicted != walk.walked && walk.rows[walk.evicted % kAhead] == victim;
    if (is_next) {
      ++walk.evicted;
    } else {
      walk.evicted = walk.fetched = walk.walked;
      walk.last = victim;
    }
    for (int i = 0; i < 2 && walk.walked - walk.evicted < kAhead; ++i) {
      // Rows that this walked over may be gone meanwhile, and their extents with them.
      if (blocks[walk.last].state != FrameState::kSealed) break;
      const FrameIndex next = blocks.behind(walk.last);
      if (next == kNoFrame) break;
      blocks.prefetch_block(next);
      walk.rows[walk.walked++ % kAhead] = next;
      walk.last = next;
    }
    for (; walk.fetched + kAhead / 2 < walk.walked; ++walk.fetched) {
      const FrameIndex row = walk.rows[walk.fetched % kAhead];
      if (blocks[row].state == FrameState::kSealed) fetch(row);
    }
  }

 private:
  static constexpr std::uint32_t kAhead = 32;
  struct Walk {
    FrameIndex last = kNoFrame;
    std::uint32_t evicted = 0;  ///< Count of the rows walked over, like `fetched`; both only rise.
    std::uint32_t fetched = 0;
    std::uint32_t walked = 0;
    std::array<FrameIndex, kAhead> rows{};  ///< The last ones.
  };
  /// Rows with the same note are in the same list.
  std::array<Walk, kNoteMask + 1> walks_;
};

}  // namespace pegaflow::engine
