#include <algorithm>

#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

void BlockStore::Impl::read_clock() {
  second = static_cast<std::uint32_t>(
      std::chrono::duration_cast<std::chrono::seconds>(clock.now() - made).count());
}

std::optional<std::uint32_t> BlockStore::next_victim_idle_s() const {
  impl_->read_clock();
  std::optional<std::uint32_t> longest;
  for (std::uint32_t shape = 0; shape < impl_->blocks.shape_count(); ++shape) {
    if (!impl_->blocks.has_shape(ShapeId{shape})) continue;
    const FrameIndex victim = impl_->blocks.victim(ShapeId{shape});
    if (victim == kNoFrame) continue;
    longest = std::max(longest.value_or(0), impl_->second - impl_->blocks[victim].idle_since_s);
  }
  return longest;
}

void BlockStore::Impl::drop(FrameIndex frame, Miss why, bool is_victim) {
  const Block& block = blocks[frame];
  const Miss reason = is_live(block.space) ? why : Miss::kReset;
  if (block.indexed && reason != Miss::kReset) note(frame, false);
  losses.remember(key_hash(block.space, block.key), reason);
  if (reason == Miss::kEvicted) {
    ++counted.evictions;
    if (blocks.is_replica(frame)) ++counted.evicted_replicas;
    counted.evicted_age.record(second - block.sealed_s);
    counted.evicted_idle.record(second - block.idle_since_s);
    is_victim ? blocks.evict(frame) : blocks.free(frame);
    return;
  }
  ++(reason == Miss::kCleaned ? counted.cleaned : counted.retired);
  counted.dropped_age.record(second - block.sealed_s);
  blocks.free(frame);
}

void BlockStore::Impl::prefetch_drop(FrameIndex frame) const {
  const Block& block = blocks[frame];
  losses.prefetch(key_hash(block.space, block.key));
  blocks.prefetch_free(frame);
}

void BlockStore::Impl::count_misses(const Space& space, std::span<const BlockKey> missing) {
  const auto prefetch = [&](std::size_t first) {
    const std::size_t end = std::min(first + BlockTable::kGroup, missing.size());
    for (std::size_t i = first; i < end; ++i) losses.prefetch(key_hash(space.id, missing[i]));
  };
  // An unknown block between known ones was present too: a later block of a chain is never
  // requested or saved without the earlier ones. It was lost long ago, and so most likely evicted.
  constexpr std::size_t kPatience = BlockTable::kGroup;
  std::size_t told = 0;
  prefetch(0);
  blocks.find_each(space.shape, space.id, missing, [&](std::size_t i, FrameIndex frame) {
    if (i % BlockTable::kGroup == 0) prefetch(i + BlockTable::kGroup);
    const Miss why = why_missing(space, missing[i], frame);
    if (why == Miss::kNew) return i - told < kPatience;
    counted.misses[static_cast<std::size_t>(Miss::kEvicted)] += i - told;
    ++counted.misses[static_cast<std::size_t>(why)];
    told = i + 1;
    return true;
  });
  counted.misses[static_cast<std::size_t>(Miss::kNew)] += missing.size() - told;
}

Miss BlockStore::Impl::why_missing(const Space& space, const BlockKey& key,
                                   FrameIndex frame) const {
  if (frame != kNoFrame) {
    if (blocks[frame].state == FrameState::kSealed) {
      return blocks.is_leaving(frame) ? Miss::kEvicted : Miss::kBehindHole;
    }
    if (blocks.is_in_flight(frame)) return Miss::kInFlight;
    return may_publish(jobs[blocks[frame].owner]) ? Miss::kBeingSaved : Miss::kSaveFailed;
  }
  const Miss why = losses.why(key_hash(space.id, key));
  return why == Miss::kNew && space.former ? losses.why(key_hash(*space.former, key)) : why;
}

}  // namespace pegaflow::engine
