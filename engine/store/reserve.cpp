#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

bool BlockStore::Impl::may_publish(const Job& job) const {
  if (job.fate != Job::Fate::kLive || job.space->is_retired) return false;
  return std::none_of(job.writers.begin(), job.writers.end(), [&](std::uint32_t number) {
    if (number == Job::kNotRequested || number == Job::kDone) return false;
    const Holder& holder = *jobs.writer_row(number).holder;
    return holder.is_lost || holder.is_gone;
  });
}

Result<std::uint32_t> BlockStore::Impl::reservable(Holder& writer, const Space& where,
                                                   const JobId& id) const {
  const std::uint32_t row = jobs.find(id);
  if (row == JobTable::kNone) {
    if (jobs.is_full()) {
      return fail(Errc::kBusy, "there are {} reservations already", jobs.size());
    }
    return row;
  }
  const Job& job = jobs[row];
  if (!may_publish(job)) return fail(Errc::kGone, "job {} was forgotten", id.number);
  if (job.shards() != writer.shards || job.space != &where) {
    return fail(Errc::kInvalidArgument,
                "job {} belongs to another instance or namespace generation", id.number);
  }
  const Writer* const known = jobs.writer(row, writer.shard);
  if (known != nullptr && known->holder != &writer) {
    return fail(Errc::kInvalidArgument, "job {} belongs to another holder", id.number);
  }
  if (known != nullptr && known->has_published) {
    return fail(Errc::kInvalidArgument, "job {} was published", id.number);
  }
  return row;
}

Result<std::vector<FrameIndex>> BlockStore::reserve(HolderId holder, SpaceId space, const JobId& id,
                                                    std::size_t first,
                                                    std::span<const BlockKey> keys,
                                                    NoRoom no_room) {
  Holder* const writer = impl_->active_holder(holder);
  if (writer == nullptr) return fail(Errc::kGone, "reserve for a holder that left");
  Space* const where = impl_->live_space(space);
  if (where == nullptr)
    return fail(Errc::kGone, "reserve in a namespace generation that was reset");
  PEGA_TRY_LET(std::uint32_t row, impl_->reservable(*writer, *where, id));

  JobTable& jobs = impl_->jobs;
  const auto add_job = [&] {
    if (row != JobTable::kNone) return row;
    row = jobs.add(id, writer->shards, *where, impl_->blocks.layout(where->shape).frame_bytes(),
                   impl_->clock.now() + impl_->options.reservation_timeout);
    jobs.add_writer(row, *writer);
    return row;
  };
  std::vector<FrameIndex> frames(keys.size(), kNoFrame);
  std::size_t decided = 0;
  const bool is_shared = writer->shards > 1;
  if (is_shared) {
    const std::size_t answers = row == JobTable::kNone ? 0 : jobs[row].answers.size();
    const Writer* const known = row == JobTable::kNone ? nullptr : jobs.writer(row, writer->shard);
    const std::size_t requested = known == nullptr ? 0 : known->requested;
    if (first > requested) {
      return fail(Errc::kInvalidArgument, "key {} of job {} before key {}", first, id.number,
                  requested);
    }
    if (row != JobTable::kNone && known == nullptr) jobs.add_writer(row, *writer);
    add_job();
    decided = std::min(answers - first, keys.size());
    std::copy_n(jobs[row].answers.begin() + static_cast<std::ptrdiff_t>(first), decided,
                frames.begin());
  }
  impl_->read_clock();
  BlockTable& blocks = impl_->blocks;
  std::uint32_t steps = impl_->options.slice_blocks;
  decided += blocks.find_each(where->shape, space, keys.subspan(decided),
                              [&, known = decided](std::size_t i, FrameIndex present) {
                                const auto frame = impl_->decide(*where, keys[known + i], present,
                                                                 steps, no_room, add_job);
                                if (!frame) return false;
                                frames[known + i] = *frame;
                                if (is_shared) jobs.add_answer(row, *frame);
                                return true;
                              });
  frames.resize(decided);
  if (is_shared) jobs.note_requested(row, writer->shard, first + decided);
  return frames;
}

template <typename AddJob>
std::optional<FrameIndex> BlockStore::Impl::decide(const Space& space, const BlockKey& key,
                                                   FrameIndex present, std::uint32_t& steps,
                                                   NoRoom no_room, AddJob&& add_job) {
  if (present != kNoFrame) {
    if (blocks.is_readable(present) || blocks.is_in_flight(present) || is_being_saved(present)) {
      ++counted.skipped_present;
      if (blocks[present].state == FrameState::kSealed) note(present, true);
      return kNoFrame;
    }
    move_key(present);
  }
  const Room room = make_room(space.shape, steps, MayRevoke::kYes);
  if (room == Room::kLater && no_room == NoRoom::kStop) return std::nullopt;
  if (room != Room::kThere) {
    ++counted.skipped_no_room;
    losses.remember(key_hash(space.id, key), Miss::kNoRoom);
    return kNoFrame;
  }
  const std::uint32_t row = add_job();
  const FrameIndex frame = blocks.take_free(space.shape, space.id, key, row);
  jobs.add_frame(row, frame);
  return frame;
}

void BlockStore::Impl::move_key(FrameIndex present) {
  if (blocks[present].state == FrameState::kSealed) {
    drop(present, Miss::kEvicted);  // Its extent is leaving.
  } else {
    // Its job will never seal it, but a writer may still write: the key moves to another frame.
    blocks.unlist(present);
  }
}

BlockStore::Impl::Room BlockStore::Impl::make_room(ShapeId shape, std::uint32_t& steps,
                                                   MayRevoke may_revoke) {
  for (;;) {
    if (blocks.has_free(shape) || blocks.grow(shape)) return Room::kThere;
    const FrameIndex victim = blocks.victim(shape);
    for (const ExtentId extent : blocks.start_exchange(shape, victim)) {
      queue.emplace_back(LeavingWork{extent, blocks.extent(extent).serial, shape});
    }
    // An exchange in progress for this shape comes before its own blocks, as far as the steps
    // allow.
    const bool may_wait = steps != 0 && (blocks.is_exchanging(shape) || victim == kNoFrame);
    if (!may_wait) {
      const Room otherwise = blocks.is_exchanging(shape) ? Room::kLater : Room::kNone;
      if (victim == kNoFrame) return otherwise;
      if (blocks.is_leaving(victim)) {  // It frees nothing for this shape.
        if (steps == 0) return otherwise;
        --steps;
      }
      ahead.step(blocks, victim, [this](FrameIndex next) { prefetch_drop(next); });
      drop(victim, Miss::kEvicted, true);
      continue;
    }
    if (queue.empty()) {
      if (may_revoke == MayRevoke::kNo) return Room::kNone;
      const std::uint32_t claim = claims.first_to_revoke(clock.now(), options.claim_grace);
      if (claim == ClaimTable::kNone) return Room::kNone;
      ++counted.claims_revoked;
      end_claim(claim);
    }
    if (do_step()) --steps;
  }
}

}  // namespace pegaflow::engine
