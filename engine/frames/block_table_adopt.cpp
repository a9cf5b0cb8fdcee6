#include <algorithm>
#include <atomic>
#include <vector>

#include "base/assert.h"
#include "engine/frames/block_table.h"

namespace pegaflow::engine {

/// A row that is whole, and the count of uses since its own.
struct BlockTable::Aged {
  std::uint32_t age = 0;
  FrameIndex row = kNoFrame;
};

Result<void> BlockTable::restore_shape(std::uint32_t number, const Shape& shape) {
  if (number >= 2 * kMaxShapes) {
    return fail(Errc::kCorrupt, "shape {} of the kept pool is beyond {}", number, 2 * kMaxShapes);
  }
  if (shapes_.size() <= number) shapes_.resize(number + 1);
  if (shapes_[number] != nullptr) {
    return fail(Errc::kCorrupt, "shape {} of the kept pool is recorded twice", number);
  }
  PEGA_TRY_LET(shapes_[number], make_shape(placed(shape), number));
  return {};
}

Result<BlockTable::Adopted> BlockTable::adopt(const IsLive& is_live) {
  PEGA_ASSERT(kept_ != nullptr && written_ + sealed_ == 0, "adoption after the first block");
  uses_ = rows_->uses();
  std::vector<ExtentId> restored;
  for (ExtentId id = 0; id < kept_extents_.size(); ++id) {
    const KeptExtent& kept = kept_extents_[id];
    if (kept.serial == 0) continue;
    const ShapeId shape{kept.shape};
    if (kept.shape >= shapes_.size() || !has_shape(shape)) {
      return fail(Errc::kCorrupt, "extent {} of the kept pool has shape {}, which is not recorded",
                  id, kept.shape);
    }
    PEGA_TRY(extents_.restore(id, kept, shape, of(shape).layout));
    ++of(shape).extents;
    of(shape).frames += kept.frames;
    restored.push_back(id);
  }
  Adopted adopted;
  std::vector<Aged> whole;
  for (const ExtentId id : restored) adopt_rows(id, is_live, whole, adopted);
  // The one used longest ago first, as it was.
  std::sort(whole.begin(), whole.end(), [](const Aged& left, const Aged& right) {
    return left.age != right.age ? left.age > right.age : left.row < right.row;
  });
  for (const Aged& each : whole) {
    const Block& block = block_at(each.row);
    const bool is_held = block.holds != 0;
    if (find(shape_of(each.row), block.space, block.key) != kNoFrame) {
      quarantine(each.row);  // A second one of that name, which the former process never had.
      ++adopted.discarded;
      adopted.held.push_back(each.row);
      continue;
    }
    adopt_block(each.row, is_held);
    ++adopted.blocks;
    adopted.bytes += frame_bytes(extent_of(each.row));
    if (is_held) adopted.held.push_back(each.row);
  }
  for (const ExtentId id : restored) end_adoption(id);
  // Of shapes that the former process was giving up when it died.
  for (std::uint32_t number = 0; number < KeptTables::kPolicies; ++number) {
    if (number >= shapes_.size() || shapes_[number] == nullptr) kept_->forget_policy(number);
  }
  return adopted;
}

/// Frees the rows of an extent that no process can access, quarantines those that are not whole,
/// and appends those that are to `whole`.
void BlockTable::adopt_rows(ExtentId id, const IsLive& is_live, std::vector<Aged>& whole,
                            Adopted& adopted) {
  Extent& extent = extents_[id];
  for (std::uint32_t i = 0; i < extent.touched; ++i) {
    const FrameIndex row = first_row(id) + i;
    Block& block = block_at(row);
    const std::uint64_t proof = proofs_[row];
    if (block.state == FrameState::kFree) {
      if (proof != 0) disprove(row);
      extent.freed.push_back(*rows_, row);
      continue;
    }
    const bool is_whole = proof != 0 && block.state == FrameState::kSealed && block.indexed &&
                          proof == row_proof(block, row, extent.serial);
    if (is_whole && is_live(extent.shape(), block.space)) {
      whole.push_back({rows_->age(row), row});
      continue;
    }
    ++adopted.discarded;
    disprove(row);
    if (is_whole && block.holds == 0) {
      // Of a generation that has ended, and nothing reads it.
      block.state = FrameState::kFree;
      extent.freed.push_back(*rows_, row);
      continue;
    }
    quarantine(row);
    adopted.held.push_back(row);
  }
}

void BlockTable::adopt_block(FrameIndex row, bool is_held) {
  Extent& extent = extent_of(row);
  OneShape& shape = of(extent.shape());
  Block& block = block_at(row);
  const std::uint64_t bytes = shape.layout.frame_bytes();
  block.place = {};
  const std::uint32_t note = block.note;
  block.note = 0;
  // Never less than it was while a process may access the frame: this process may die here.
  block.holds = is_held ? 1 : 0;
  ++extent.used;
  ++shape.used;
  ++sealed_;
  sealed_bytes_ += bytes;
  if (block.owner == kReplica) ++replicas_;
  if (block.indexed) {
    shape.index.insert(hash(row), row);
    listed_[row / 64] |= std::uint64_t{1} << (row % 64);
  }
  EvictionPolicy& policy = policy_of(shape, block);
  policy.adopted(row, hash(row), note);
  note_use(extent, extent.made);
  extent.use_sum -= uses_ - used_at(row);  // The policy may have kept its age.
  if (!is_held) return;
  policy.taken(row);
  add_busy(extent);
  ++held_;
  held_bytes_ += bytes;
}

/// Makes a frame in use one whose block nothing can find, with one hold: it is free once that ends.
void BlockTable::quarantine(FrameIndex row) {
  disprove(row);
  Block& block = block_at(row);
  block.indexed = false;
  block.holds = 1;
  block.owner = kRestored;  // Of no writer.
  block.state = FrameState::kSealed;
  adopt_block(row, true);
}

void BlockTable::end_adoption(ExtentId id) {
  Extent& extent = extents_[id];
  if (extent.has_free()) of(extent.shape()).with_free.push_back(extents_, id);
  if (extent.used == 0) give_up(id);
}

}  // namespace pegaflow::engine
