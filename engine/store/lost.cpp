#include <algorithm>

#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

void BlockStore::Impl::look_at_clock() {
  second = static_cast<std::uint32_t>(
      std::chrono::duration_cast<std::chrono::seconds>(clock.now() - made).count());
}

std::optional<std::uint32_t> BlockStore::next_victim_idle_s() const {
  impl_->look_at_clock();
  std::optional<std::uint32_t> longest;
  for (std::uint32_t shape = 0; shape < impl_->blocks.shape_count(); ++shape) {
    if (!impl_->blocks.has_shape(ShapeId{shape})) continue;
    const FrameIndex victim = impl_->blocks.victim(ShapeId{shape});
    if (victim == kNoFrame) continue;
    longest = std::max(longest.value_or(0), impl_->second - impl_->blocks[victim].rested_s);
  }
  return longest;
}

void BlockStore::Impl::drop(FrameIndex slot, Miss why, bool is_victim) {
  const Block& block = blocks[slot];
  const Miss reason = is_live(block.space) ? why : Miss::kReset;
  if (block.indexed && reason != Miss::kReset) note(slot, false);
  losses.remember(key_hash(block.space, block.key), reason);
  if (reason == Miss::kEvicted) {
    ++counted.evictions;
    if (blocks.is_replica(slot)) ++counted.evicted_replicas;
    counted.evicted_age.record(second - block.sealed_s);
    counted.evicted_idle.record(second - block.rested_s);
    is_victim ? blocks.evict(slot) : blocks.free(slot);
    return;
  }
  ++(reason == Miss::kCleaned ? counted.cleaned : counted.retired);
  counted.dropped_age.record(second - block.sealed_s);
  blocks.free(slot);
}

void BlockStore::Impl::prefetch_drop(FrameIndex slot) const {
  const Block& block = blocks[slot];
  losses.prefetch(key_hash(block.space, block.key));
  blocks.prefetch_free(slot);
}

void BlockStore::Impl::count_misses(const Space& space, std::span<const BlockKey> missing) {
  const auto prefetch = [&](std::size_t first) {
    const std::size_t end = std::min(first + BlockTable::kGroup, missing.size());
    for (std::size_t i = first; i < end; ++i) losses.prefetch(key_hash(space.id, missing[i]));
  };
  // An unknown block between known ones was there too: a later block of a chain is never asked for
  // or saved without the earlier ones. It was lost long ago, and so most likely evicted.
  constexpr std::size_t kPatience = BlockTable::kGroup;
  std::size_t told = 0;
  prefetch(0);
  blocks.find_each(space.shape, space.id, missing, [&](std::size_t i, FrameIndex slot) {
    if (i % BlockTable::kGroup == 0) prefetch(i + BlockTable::kGroup);
    const Miss why = why_missing(space, missing[i], slot);
    if (why == Miss::kNew) return i - told < kPatience;
    counted.misses[static_cast<std::size_t>(Miss::kEvicted)] += i - told;
    ++counted.misses[static_cast<std::size_t>(why)];
    told = i + 1;
    return true;
  });
  counted.misses[static_cast<std::size_t>(Miss::kNew)] += missing.size() - told;
}

Miss BlockStore::Impl::why_missing(const Space& space, const BlockKey& key, FrameIndex slot) const {
  if (slot != kNoFrame) {
    if (blocks[slot].state == SlotState::kSealed) {
      return blocks.is_leaving(slot) ? Miss::kEvicted : Miss::kBehindHole;
    }
    if (blocks.is_coming(slot)) return Miss::kComing;
    return may_publish(jobs[blocks[slot].owner]) ? Miss::kBeingSaved : Miss::kSaveFailed;
  }
  const Miss why = losses.why(key_hash(space.id, key));
  return why == Miss::kNew && space.former ? losses.why(key_hash(*space.former, key)) : why;
}

}  // namespace pegaflow::engine
