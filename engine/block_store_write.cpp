#include <algorithm>

#include "base/assert.h"
#include "engine/block_store_impl.h"

namespace pegaflow {

Result<std::vector<SlotIndex>> BlockStore::reserve(HolderId holder, SpaceId space, const JobId& job,
                                                   std::span<const BlockKey> keys) {
  Holder* const writer = impl_->active_holder(holder);
  if (writer == nullptr) return fail(Errc::kGone, "reserve for a holder that left");
  Space* const where = impl_->live_space(space);
  if (where == nullptr) return fail(Errc::kGone, "reserve in a space that was reset");
  std::uint32_t row = impl_->jobs.find(job);
  if (row != JobTable::kNone) {
    const Job& known = impl_->jobs[row];
    if (!Impl::may_publish(known)) return fail(Errc::kGone, "job {} was forgotten", job.number);
    if (known.holder != writer || known.space != where) {
      return fail(Errc::kInvalidArgument, "job {} belongs to another holder or space", job.number);
    }
  } else if (impl_->jobs.is_full()) {
    return fail(Errc::kBusy, "there are {} reservations already", impl_->jobs.size());
  }

  impl_->look_at_clock();
  BlockTable& blocks = impl_->blocks;
  std::vector<SlotIndex> slots(keys.size(), kNoSlot);
  std::uint32_t steps = impl_->options.slice_blocks;
  blocks.find_each(space, keys, [&](std::size_t i, SlotIndex present) {
    if (i % BlockTable::kGroup == 0) impl_->prefetch_victims(BlockTable::kGroup);
    if (present != kNoSlot) {
      if (blocks[present].state == SlotState::kSealed ||
          Impl::may_publish(impl_->jobs[blocks[present].owner])) {
        ++impl_->counted.skipped_present;
        return true;
      }
      // Its job will never seal it, but its writer may still write: the key moves to another slot.
      blocks.unlist(present);
    }
    if (!impl_->make_room(steps)) {
      ++impl_->counted.skipped_no_room;
      impl_->losses.remember(key_hash(space, keys[i]), Miss::kNoRoom);
      return true;
    }
    if (row == JobTable::kNone) {
      row = impl_->jobs.add(job, *writer, *where,
                            impl_->clock.now() + impl_->options.reservation_timeout);
    }
    slots[i] = blocks.take_free(space, keys[i], row);
    impl_->jobs.add_slot(row, slots[i]);
    return true;
  });
  return slots;
}

void BlockStore::Impl::prefetch_victims(std::size_t count) const {
  if (count <= blocks.free_count()) return;
  blocks.prefetch_victims(count);
}

bool BlockStore::Impl::make_room(std::uint32_t& steps) {
  for (;;) {
    if (blocks.has_free()) return true;
    if (const SlotIndex victim = blocks.victim(); victim != kNoSlot) {
      drop(victim, Miss::kEvicted);
      return true;
    }
    if (steps == 0) return false;
    if (queue.empty()) {
      const std::uint32_t claim = claims.first_to_revoke(clock.now(), options.claim_grace);
      if (claim == ClaimTable::kNone) return false;
      ++counted.claims_revoked;
      end_claim(claim);
    }
    if (do_step()) --steps;
  }
}

bool BlockStore::Impl::may_publish(const Job& job) {
  return job.fate == Job::Fate::kLive && !job.holder->is_lost && !job.holder->is_gone &&
         !job.space->is_retired;
}

std::span<const SlotIndex> BlockStore::slots_of(HolderId holder, const JobId& job) const {
  const std::uint32_t row = impl_->jobs.find(job);
  if (row == JobTable::kNone || impl_->jobs[row].holder->id != holder ||
      !Impl::may_publish(impl_->jobs[row])) {
    return {};
  }
  return impl_->jobs[row].slots;
}

Result<std::size_t> BlockStore::publish(HolderId holder, const JobId& job, std::size_t limit) {
  const std::uint32_t row = impl_->jobs.find(job);
  if (row == JobTable::kNone || impl_->jobs[row].holder->id != holder ||
      impl_->known_holder(holder) == nullptr) {
    return fail(Errc::kGone, "job {} has no reservation of this holder", job.number);
  }
  if (!Impl::may_publish(impl_->jobs[row])) {
    ++impl_->counted.late_publishes;
    impl_->end_job(row);
    impl_->do_slice();
    return fail(Errc::kGone, "job {} was forgotten", job.number);
  }
  const std::uint32_t writer_tag = impl_->jobs[row].holder->writer_tag;
  const std::vector<SlotIndex>& slots = impl_->jobs[row].slots;
  impl_->look_at_clock();
  // From the last one on: it is to be the first that is evicted.
  const std::size_t count = std::min(limit, slots.size());
  for (std::size_t i = 0; i < count; ++i) {
    constexpr std::size_t kAhead = 8;
    if (slots.size() > kAhead) impl_->blocks.prefetch_block(slots[slots.size() - 1 - kAhead]);
    impl_->blocks.seal(impl_->jobs.pop_slot(row), writer_tag, impl_->second);
  }
  impl_->counted.insertions += count;
  const std::size_t left = slots.size();
  if (left == 0) {
    impl_->jobs.end(row);
    impl_->jobs.remove(row);
  }
  return left;
}

void BlockStore::abandon(HolderId holder, const JobId& job) {
  const std::uint32_t row = impl_->jobs.find(job);
  if (row == JobTable::kNone || impl_->jobs[row].holder->id != holder ||
      impl_->known_holder(holder) == nullptr) {
    return;
  }
  impl_->end_job(row);
  impl_->do_slice();
}

void BlockStore::Impl::forget_job(std::uint32_t row) {
  const Holder& writer = *jobs[row].holder;
  const bool has_left = writer.is_lost || writer.is_gone;
  jobs.forget(row, has_left ? Job::Fate::kWriterLost : Job::Fate::kForgotten);
}

void BlockStore::Impl::end_job(std::uint32_t row) {
  jobs.end(row);
  queue.emplace_back(FreeJobWork{row});
}

void BlockStore::expire() {
  const TimePoint now = impl_->clock.now();
  for (std::uint32_t i = 0; i < impl_->options.slice_blocks; ++i) {
    const std::uint32_t row = impl_->jobs.first_due();
    if (row == JobTable::kNone || impl_->jobs[row].deadline > now) return;
    ++impl_->counted.reservations_timed_out;
    impl_->forget_job(row);
  }
}

std::optional<TimePoint> BlockStore::next_deadline() const {
  const std::uint32_t row = impl_->jobs.first_due();
  if (row == JobTable::kNone) return std::nullopt;
  return impl_->jobs[row].deadline;
}

}  // namespace pegaflow
