#include "engine/store/reclaimer.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace pegaflow::engine {

// ---- ends

void Reclaimer::end_claim(std::uint32_t row) {
  Claim claim = claims_.remove(row);
  // Its pins live on and take over its share.
  const std::uint32_t instance = claim.holder->instance;
  holders_.add_held(instance, claim.pinned_bytes);
  holders_.drop_held(instance, claim.blocks.size() * claim.frame_bytes);
  give_back(std::move(claim.blocks));
}

void Reclaimer::end_claims_together(std::uint32_t row) {
  for (;;) {
    const std::uint32_t next = claims_[row].next_together;
    end_claim(row);
    if (next == row) return;
    row = next;
  }
}

void Reclaimer::revoke(std::uint32_t claim) {
  ++claims_revoked_;
  end_claims_together(claim);
}

void Reclaimer::end_pin(std::uint32_t row) {
  Pin pin = pins_.remove(row);
  const std::uint32_t claim = claims_.find(pin.claim, pin.claim_serial);
  if (claim != ClaimTable::kNone) {
    claims_.drop_pinned(claim, pin.blocks.size());
  } else {
    holders_.drop_held(pin.instance, pin.blocks.size() * pin.frame_bytes);
  }
  if (pin.blocks.size() > FrameList::kInside) return give_back(std::move(pin.blocks));
  // At once: otherwise a client with 100,000 pins of one block each would leave as many queue
  // entries.
  step_cost_ = static_cast<std::uint32_t>(pin.blocks.size());
  while (!pin.blocks.empty()) blocks_.give_back_last(pin.blocks);
}

void Reclaimer::forget_job(std::uint32_t row) {
  jobs_.forget(row);
  end_job_if_over(row);
}

void Reclaimer::end_shard(std::uint32_t row, std::uint32_t shard) {
  jobs_.end_shard(row, shard);
  end_job_if_over(row);
}

void Reclaimer::end_job_if_over(std::uint32_t row) {
  if (jobs_[row].writing != 0) return;
  if (jobs_[row].fate != Job::Fate::kEnded) {
    jobs_.end(row);
    if (!jobs_[row].frames.empty()) {
      jobs_.set_queued(row, true);
      queue_.emplace_back(FreeJobWork{row});
    }
  }
  jobs_.remove_if_unused(row);
}

void Reclaimer::retire(SpaceId space) {
  queue_.emplace_back(RetireWork{space});
  for (Work& work : queue_) {
    if (auto* const sweep = std::get_if<DeadSweepWork>(&work)) {
      sweep->again = sweep->next != 0;
      return;
    }
  }
  queue_.emplace_back(DeadSweepWork{});
}

void Reclaimer::start_cleanup() {
  const auto is_cleanup = [](const Work& work) {
    return std::holds_alternative<CleanupWork>(work);
  };
  if (std::any_of(queue_.begin(), queue_.end(), is_cleanup)) return;
  cleanup_ = {};
  queue_.emplace_back(CleanupWork{});
}

// ---- queued work

void Reclaimer::do_slice() {
  blocks_.read_clock();
  while (const auto shape = blocks_.take_unused()) queue_.emplace_back(ForgetShapeWork{*shape});
  for (std::uint32_t i = 0; i < options_.slice_blocks && do_step();) {
    i += step_cost_;
  }
}

bool Reclaimer::do_step() {
  step_cost_ = 1;
  while (!queue_.empty()) {
    // A step may append to the queue; a deque keeps the first element where it is.
    if (std::visit([this](auto& work) { return step(work); }, queue_.front())) return true;
    queue_.pop_front();
  }
  return false;
}

bool Reclaimer::step(GiveBackWork& work) {
  if (work.blocks.empty()) return false;
  constexpr std::size_t kAhead = 8;
  const std::size_t last = work.blocks.size() - 1;
  if (last >= kAhead) blocks_.table().prefetch_block(work.blocks[last - kAhead]);
  blocks_.give_back_last(work.blocks);
  return true;
}

bool Reclaimer::step(FreeJobWork& work) {
  if (jobs_[work.job].frames.empty()) {
    jobs_.set_queued(work.job, false);
    jobs_.remove_if_unused(work.job);
    return false;
  }
  blocks_.discard(jobs_.pop_frame(work.job));
  return true;
}

bool Reclaimer::step(LeaveWork& work) {
  const Holder* const found = holders_.find(work.holder);
  if (found == nullptr) return false;
  const Holder& holder = *found;
  if (!holder.claims.is_empty()) {
    end_claim(holder.claims.front());
    return true;
  }
  if (!holder.live_writers.is_empty()) {
    const ShardWriter& writer = jobs_.writer_row(holder.live_writers.front());
    const std::uint32_t job = writer.job;
    const bool ends_now = holder.is_gone && !writer.has_published;
    forget_job(job);
    if (ends_now) end_shard(job, holder.shard);
    return true;
  }
  if (!holder.is_gone) return false;
  if (!holder.forgotten_writers.is_empty()) {
    end_shard(jobs_.writer_row(holder.forgotten_writers.front()).job, holder.shard);
    return true;
  }
  if (!holder.pins.is_empty()) {
    end_pin(holder.pins.front());
    return true;
  }
  holders_.remove(work.holder);
  return false;
}

bool Reclaimer::step(RetireWork& work) {
  const Space& space = spaces_[work.space];
  if (!space.claims.is_empty()) {
    revoke(space.claims.front());
    return true;
  }
  if (!space.jobs.is_empty()) {
    forget_job(space.jobs.front());
    return true;
  }
  const ShapeId shape = space.shape;
  spaces_.remove(work.space);
  blocks_.drop_space(shape);
  return false;
}

bool Reclaimer::step(DeadSweepWork& work) {
  FrameIndex frame = blocks_.table().next_touched(work.next);
  if (frame == kNoFrame && work.again) {
    work = {};
    frame = blocks_.table().next_touched(0);
  }
  if (frame == kNoFrame) return false;
  work.next = frame + 1;
  const Block& block = blocks_[frame];
  if (block.state == FrameState::kSealed && block.holds == 0 && !spaces_.is_live(block.space)) {
    blocks_.drop(frame, Miss::kReset);
  }
  return true;
}

bool Reclaimer::step(CleanupWork& work) {
  const FrameIndex frame = blocks_.table().next_touched(work.next);
  if (frame == kNoFrame) {
    cleanup_.done = true;
    return false;
  }
  work.next = frame + 1;
  prefetch_sweep(frame);
  const Block& block = blocks_[frame];
  if (block.state == FrameState::kFree) return true;
  if (block.state != FrameState::kSealed || block.holds != 0) {
    ++cleanup_.still_referenced_blocks;
    return true;
  }
  ++cleanup_.evicted_blocks;
  cleanup_.evicted_bytes += blocks_.frame_bytes(blocks_.table().shape_of(frame));
  blocks_.drop(frame, Miss::kCleaned);
  return true;
}

bool Reclaimer::step(LeavingWork& work) {
  // All of its blocks were evictable when it began to leave, and lookups no longer find them. The
  // extent ends with its last block.
  const auto is_present = [&] { return blocks_.table().extent(work.extent).serial == work.serial; };
  while (is_present() && work.next < blocks_.table().extent(work.extent).touched) {
    const FrameIndex frame = blocks_.table().first_row(work.extent) + work.next++;
    prefetch_sweep(frame);
    if (blocks_[frame].state != FrameState::kSealed) continue;
    blocks_.drop(frame, Miss::kEvicted);
    return true;
  }
  PEGA_ASSERT(!is_present(), "extent {} is leaving with blocks in it", work.extent);
  blocks_.end_exchange(work.for_shape);
  return false;
}

bool Reclaimer::step(TouchWork& work) {
  // Allocating a page of memory costs about as much as returning four blocks.
  if (!blocks_.touch(work.shape, work.next++)) return false;
  step_cost_ = 4;
  return true;
}

bool Reclaimer::step(ForgetShapeWork& work) {
  // Returning a page costs less than allocating one, and many go at once: 1 MiB in some 50 us.
  constexpr std::size_t kPages = 256;
  if (!blocks_.forget(work.shape, work.next, kPages)) {
    blocks_.remove_shape(work.shape);
    return false;
  }
  work.next += kPages;
  step_cost_ = 64;
  return true;
}

void Reclaimer::prefetch_sweep(FrameIndex frame) const {
  // Frames are visited in order, which the hardware detects; their index cells and neighbors are
  // not.
  constexpr FrameIndex kAhead = 8;
  const FrameIndex later = blocks_.table().next_touched(frame + kAhead);
  if (later != frame + kAhead || blocks_[later].state != FrameState::kSealed) return;
  blocks_.prefetch_drop(later);
  blocks_.table().prefetch_neighbours(later);
}

// ---- room

Reclaimer::Room Reclaimer::make_room(ShapeId shape, std::uint32_t& steps, MayRevoke may_revoke,
                                     const NewBlock* saved) {
  const BlockTable& table = blocks_.table();
  for (;;) {
    if (table.has_free(shape) || blocks_.grow(shape)) return Room::kThere;
    const FrameIndex victim = blocks_.victim(shape);
    for (const ExtentId extent : blocks_.start_exchange(shape, victim)) {
      queue_.emplace_back(LeavingWork{extent, table.extent(extent).serial, shape});
    }
    // An exchange in progress for this shape comes before its own blocks, as far as the steps
    // allow.
    const bool may_wait = steps != 0 && (table.is_exchanging(shape) || victim == kNoFrame);
    if (!may_wait) {
      const Room otherwise = table.is_exchanging(shape) ? Room::kLater : Room::kNone;
      if (victim == kNoFrame) return otherwise;
      if (table.is_leaving(victim)) {  // It frees nothing for this shape.
        if (steps == 0) return otherwise;
        --steps;
      } else if (saved != nullptr && blocks_.refuses(shape, saved->space, saved->key, victim)) {
        return Room::kRefused;
      }
      blocks_.evict(victim);
      continue;
    }
    if (queue_.empty()) {
      if (may_revoke == MayRevoke::kNo) return Room::kNone;
      const std::uint32_t claim = claims_.first_to_revoke(clock_.now(), options_.claim_grace);
      if (claim == ClaimTable::kNone) return Room::kNone;
      revoke(claim);
    }
    if (do_step()) --steps;
  }
}

Reclaimer::Room Reclaimer::make_room_of_replicas(ShapeId shape) {
  const BlockTable& table = blocks_.table();
  for (;;) {
    if (table.has_free(shape) || blocks_.grow(shape)) return Room::kThere;
    const FrameIndex victim = blocks_.victim(shape);  // Replicas come first.
    const bool may_evict =
        victim != kNoFrame && table.is_replica(victim) && !table.is_leaving(victim);
    if (!may_evict) return Room::kNone;
    blocks_.evict(victim);
  }
}

}  // namespace pegaflow::engine
