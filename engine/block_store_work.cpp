#include <algorithm>
#include <variant>

#include "base/assert.h"
#include "engine/block_store_impl.h"

namespace pegaflow {

bool BlockStore::work() {
  impl_->do_slice();
  return has_work();
}

bool BlockStore::has_work() const { return !impl_->queue.empty(); }

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
  look_at_clock();
  for (std::uint32_t i = 0; i < options.slice_blocks && do_step(); ++i) {
  }
}

bool BlockStore::Impl::do_step() {
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
  give_back(work.blocks[last]);
  work.blocks.pop_back();
  --listed_blocks;
  return true;
}

void BlockStore::Impl::give_back(SlotIndex slot) {
  if (!blocks.unhold(slot, second)) return;
  const Block& block = blocks[slot];
  if (!block.indexed) {
    blocks.free(slot);  // Condemned, and counted when it was.
  } else if (!is_live(block.space)) {
    drop(slot, Miss::kReset);
  }
}

bool BlockStore::Impl::step(FreeJobWork& work) {
  if (jobs[work.job].slots.empty()) {
    jobs.remove(work.job);
    return false;
  }
  const SlotIndex slot = jobs.pop_slot(work.job);
  // Otherwise its key has moved to another slot.
  if (blocks[slot].indexed) {
    losses.remember(key_hash(blocks[slot].space, blocks[slot].key), Miss::kSaveFailed);
  }
  blocks.free(slot);
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
  if (!holder.is_gone) {
    if (holder.live_jobs.is_empty()) return false;
    forget_job(holder.live_jobs.front());
    return true;
  }
  if (!holder.live_jobs.is_empty()) {
    end_job(holder.live_jobs.front());
    return true;
  }
  if (!holder.forgotten_jobs.is_empty()) {
    end_job(holder.forgotten_jobs.front());
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
  spaces.erase(work.space);
  return false;
}

bool BlockStore::Impl::step(DeadSweepWork& work) {
  if (work.next >= blocks.untouched_from()) {
    if (!work.again) return false;
    work = {};
  }
  if (work.next >= blocks.untouched_from()) return false;
  const SlotIndex slot = work.next++;
  const Block& block = blocks[slot];
  if (block.state == SlotState::kSealed && block.holds == 0 && !is_live(block.space)) {
    drop(slot, Miss::kReset);
  }
  return true;
}

bool BlockStore::Impl::step(CleanupWork& work) {
  if (work.next >= blocks.untouched_from()) {
    cleanup.done = true;
    return false;
  }
  const SlotIndex slot = work.next++;
  prefetch_sweep(slot);
  const Block& block = blocks[slot];
  if (block.state == SlotState::kFree) return true;
  if (block.state == SlotState::kWritten || block.holds != 0) {
    ++cleanup.still_referenced_blocks;
    return true;
  }
  ++cleanup.evicted_blocks;
  drop(slot, Miss::kCleaned);
  return true;
}

void BlockStore::Impl::prefetch_sweep(SlotIndex slot) const {
  // Slots come in order, which the hardware sees; their index cells and neighbours do not.
  constexpr SlotIndex kAhead = 8;
  if (slot + kAhead >= blocks.untouched_from()) return;
  if (blocks[slot + kAhead].state != SlotState::kSealed) return;
  blocks.prefetch_cell(slot + kAhead);
  blocks.prefetch_neighbours(slot + kAhead);
}

}  // namespace pegaflow
