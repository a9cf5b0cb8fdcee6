#include <algorithm>
#include <variant>

#include "base/assert.h"
#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

bool BlockStore::work() {
  impl_->do_slice();
  return has_work();
}

bool BlockStore::has_work() const { return !impl_->queue.empty() || impl_->blocks.has_unused(); }

void BlockStore::start_cleanup() {
  const auto is_cleanup = [](const Work& work) {
    return std::holds_alternative<CleanupWork>(work);
  };
  if (std::none_of(impl_->queue.begin(), impl_->queue.end(), is_cleanup)) {
    impl_->cleanup = {};
    impl_->queue.emplace_back(CleanupWork{});
  }
  impl_->do_slice();
}

const BlockStore::Cleanup& BlockStore::cleanup() const { return impl_->cleanup; }

void BlockStore::Impl::do_slice() {
  read_clock();
  while (const auto shape = blocks.take_unused()) queue.emplace_back(ForgetShapeWork{*shape});
  for (std::uint32_t i = 0; i < options.slice_blocks && do_step();) {
    i += step_cost;
  }
}

bool BlockStore::Impl::do_step() {
  step_cost = 1;
  while (!queue.empty()) {
    // A step may append to the queue; a deque keeps the first element where it is.
    if (std::visit([this](auto& work) { return step(work); }, queue.front())) return true;
    queue.pop_front();
  }
  return false;
}

bool BlockStore::Impl::step(GiveBackWork& work) {
  if (work.blocks.empty()) return false;
  constexpr std::size_t kAhead = 8;
  const std::size_t last = work.blocks.size() - 1;
  if (last >= kAhead) blocks.prefetch_block(work.blocks[last - kAhead]);
  give_back_last(work.blocks);
  return true;
}

void BlockStore::Impl::give_back_last(FrameList& frames) {
  const FrameIndex frame = frames[frames.size() - 1];
  frames.pop_back();
  --listed_blocks;
  give_back(frame);
}

void BlockStore::Impl::give_back(FrameIndex frame) {
  const bool is_evictable = blocks.unhold(frame, second);
  const Block& block = blocks[frame];
  if (!is_evictable) {
    const bool is_over =
        block.state == FrameState::kFetched && blocks.fetch_state(frame) == FetchState::kQuiesced;
    if (is_over && block.holds == 0) blocks.free(frame);
    return;
  }
  if (!block.indexed) {
    blocks.free(frame);  // Invalidated, and counted at that time.
  } else if (!is_live(block.space)) {
    drop(frame, Miss::kReset);
  }
}

bool BlockStore::Impl::step(FreeJobWork& work) {
  if (jobs[work.job].frames.empty()) {
    jobs.set_queued(work.job, false);
    jobs.remove_if_unused(work.job);
    return false;
  }
  const FrameIndex frame = jobs.pop_frame(work.job);
  // Otherwise its key has moved to another frame.
  if (blocks[frame].indexed) {
    losses.remember(key_hash(blocks[frame].space, blocks[frame].key), Miss::kSaveFailed);
  }
  blocks.free(frame);
  return true;
}

bool BlockStore::Impl::step(LeaveWork& work) {
  const auto found = holders.find(work.holder);
  if (found == holders.end()) return false;
  Holder& holder = found->second;
  if (!holder.claims.is_empty()) {
    end_claim(holder.claims.front());
    return true;
  }
  if (!holder.live_writers.is_empty()) {
    const Writer& writer = jobs.writer_row(holder.live_writers.front());
    const std::uint32_t job = writer.job;
    const bool ends_now = holder.is_gone && !writer.has_published;
    forget_job(job);
    if (ends_now) end_shard(job, holder.shard);
    return true;
  }
  if (!holder.is_gone) return false;
  if (!holder.forgotten_writers.is_empty()) {
    end_shard(jobs.writer_row(holder.forgotten_writers.front()).job, holder.shard);
    return true;
  }
  if (!holder.pins.is_empty()) {
    end_pin(holder.pins.front());
    return true;
  }
  const std::uint32_t instance = holder.instance;
  --instances.at(instance).holders;
  holders.erase(found);
  forget_instance_if_unused(instance);
  return false;
}

bool BlockStore::Impl::step(RetireWork& work) {
  Space& space = spaces.at(work.space);
  if (!space.claims.is_empty()) {
    ++counted.claims_revoked;
    end_claim(space.claims.front());
    return true;
  }
  if (!space.jobs.is_empty()) {
    forget_job(space.jobs.front());
    return true;
  }
  const ShapeId shape = space.shape;
  spaces.erase(work.space);
  blocks.drop_space(shape);
  return false;
}

bool BlockStore::Impl::step(DeadSweepWork& work) {
  FrameIndex frame = blocks.next_touched(work.next);
  if (frame == kNoFrame && work.again) {
    work = {};
    frame = blocks.next_touched(0);
  }
  if (frame == kNoFrame) return false;
  work.next = frame + 1;
  const Block& block = blocks[frame];
  if (block.state == FrameState::kSealed && block.holds == 0 && !is_live(block.space)) {
    drop(frame, Miss::kReset);
  }
  return true;
}

bool BlockStore::Impl::step(CleanupWork& work) {
  const FrameIndex frame = blocks.next_touched(work.next);
  if (frame == kNoFrame) {
    cleanup.done = true;
    return false;
  }
  work.next = frame + 1;
  prefetch_sweep(frame);
  const Block& block = blocks[frame];
  if (block.state == FrameState::kFree) return true;
  if (block.state != FrameState::kSealed || block.holds != 0) {
    ++cleanup.still_referenced_blocks;
    return true;
  }
  ++cleanup.evicted_blocks;
  cleanup.evicted_bytes += blocks.layout(blocks.shape_of(frame)).frame_bytes();
  drop(frame, Miss::kCleaned);
  return true;
}

bool BlockStore::Impl::step(LeavingWork& work) {
  // All of its blocks were evictable when it began to leave, and lookups no longer find them. The
  // extent ends with its last block.
  const auto is_present = [&] { return blocks.extent(work.extent).serial == work.serial; };
  while (is_present() && work.next < blocks.extent(work.extent).touched) {
    const FrameIndex frame = blocks.first_row(work.extent) + work.next++;
    prefetch_sweep(frame);
    if (blocks[frame].state != FrameState::kSealed) continue;
    drop(frame, Miss::kEvicted);
    return true;
  }
  PEGA_ASSERT(!is_present(), "extent {} is leaving with blocks in it", work.extent);
  blocks.end_exchange(work.for_shape);
  return false;
}

bool BlockStore::Impl::step(TouchWork& work) {
  // Allocating a page of memory costs about as much as returning four blocks.
  if (!blocks.touch(work.shape, work.next++)) return false;
  step_cost = 4;
  return true;
}

bool BlockStore::Impl::step(ForgetShapeWork& work) {
  // Returning a page costs less than allocating one, and many go at once: 1 MiB in some 50 us.
  constexpr std::size_t kPages = 256;
  if (!blocks.forget(work.shape, work.next, kPages)) {
    blocks.remove_shape(work.shape);
    return false;
  }
  work.next += kPages;
  step_cost = 64;
  return true;
}

void BlockStore::Impl::prefetch_sweep(FrameIndex frame) const {
  // Frames are visited in order, which the hardware detects; their index cells and neighbors are
  // not.
  constexpr FrameIndex kAhead = 8;
  const FrameIndex later = blocks.next_touched(frame + kAhead);
  if (later != frame + kAhead || blocks[later].state != FrameState::kSealed) return;
  prefetch_drop(later);
  blocks.prefetch_neighbours(later);
}

}  // namespace pegaflow::engine
