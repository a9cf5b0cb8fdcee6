#include "engine/store/writer.h"

#include <algorithm>

#include "base/assert.h"

namespace pegaflow::engine {

Result<std::uint32_t> Writer::reservable(Holder& writer, const Space& where,
                                         const JobId& id) const {
  const std::uint32_t row = jobs_.find(id);
  if (row == JobTable::kNone) {
    if (jobs_.is_full()) {
      return fail(Errc::kBusy, "there are {} reservations already", jobs_.size());
    }
    return row;
  }
  const Job& job = jobs_[row];
  if (!jobs_.may_publish(row)) return fail(Errc::kGone, "job {} was forgotten", id.number);
  if (job.shards() != writer.shards || job.space != &where) {
    return fail(Errc::kInvalidArgument,
                "job {} belongs to another instance or namespace generation", id.number);
  }
  const ShardWriter* const known = jobs_.writer(row, writer.shard);
  if (known != nullptr && known->holder != &writer) {
    return fail(Errc::kInvalidArgument, "job {} belongs to another holder", id.number);
  }
  if (known != nullptr && known->has_published) {
    return fail(Errc::kInvalidArgument, "job {} was published", id.number);
  }
  return row;
}

Result<std::vector<FrameIndex>> Writer::reserve(HolderId holder, SpaceId space, const JobId& id,
                                                std::size_t first, std::span<const BlockKey> keys,
                                                BlockStore::NoRoom no_room,
                                                std::span<const std::uint8_t> depths,
                                                BlockStore::MayRefuse may_refuse) {
  Holder* const writer = holders_.active(holder);
  if (writer == nullptr) return fail(Errc::kGone, "reserve for a holder that left");
  Space* const where = spaces_.live(space);
  if (where == nullptr)
    return fail(Errc::kGone, "reserve in a namespace generation that was reset");
  const Shape& shape = blocks_.table().shape(where->shape);
  if (writer->shard < shape.shards.size() && shape.shards[writer->shard].page_bytes == 0) {
    return fail(Errc::kInvalidArgument, "reserve for shard {}, which has no page in these blocks",
                writer->shard);
  }
  PEGA_TRY_LET(std::uint32_t row, reservable(*writer, *where, id));

  const auto add_job = [&] {
    if (row != JobTable::kNone) return row;
    row = jobs_.add(id, writer->shards, *where, shape, blocks_.frame_bytes(where->shape),
                    clock_.now() + options_.reservation_timeout);
    jobs_.add_writer(row, *writer);
    return row;
  };
  std::vector<FrameIndex> frames(keys.size(), kNoFrame);
  std::size_t decided = 0;
  const bool is_shared = writer->shards > 1;
  if (is_shared) {
    const std::size_t answers = row == JobTable::kNone ? 0 : jobs_[row].answers.size();
    const ShardWriter* const known =
        row == JobTable::kNone ? nullptr : jobs_.writer(row, writer->shard);
    const std::size_t requested = known == nullptr ? 0 : known->requested;
    if (first > requested) {
      return fail(Errc::kInvalidArgument, "key {} of job {} before key {}", first, id.number,
                  requested);
    }
    if (row != JobTable::kNone && known == nullptr) jobs_.add_writer(row, *writer);
    add_job();
    decided = std::min(answers - first, keys.size());
    std::copy_n(jobs_[row].answers.begin() + static_cast<std::ptrdiff_t>(first), decided,
                frames.begin());
  }
  begin_save(where->shape, id, may_refuse);
  std::uint32_t steps = options_.slice_blocks;
  decided += blocks_.table().find_each(
      where->shape, space, keys.subspan(decided),
      [&, known = decided](std::size_t i, FrameIndex present) {
        const std::size_t at = known + i;
        const auto frame = decide(*where, keys[at],
                                  at < depths.size() ? depth_from_sent(depths[at]) : kUnknownDepth,
                                  present, steps, no_room, may_refuse, add_job);
        if (!frame) return false;
        frames[at] = *frame;
        if (is_shared) jobs_.add_answer(row, *frame);
        return true;
      });
  frames.resize(decided);
  if (is_shared) jobs_.note_requested(row, writer->shard, first + decided);
  return frames;
}

void Writer::begin_save(ShapeId shape, const JobId& id, BlockStore::MayRefuse may_refuse) {
  blocks_.read_clock();
  if (id != last_) blocks_.begin_save(shape, may_refuse == BlockStore::MayRefuse::kYes);
  last_ = id;
}

template <typename AddJob>
std::optional<FrameIndex> Writer::decide(const Space& space, const BlockKey& key, Depth depth,
                                         FrameIndex present, std::uint32_t& steps,
                                         BlockStore::NoRoom no_room,
                                         BlockStore::MayRefuse may_refuse, AddJob&& add_job) {
  if (present != kNoFrame) {
    if (blocks_.table().is_readable(present) || blocks_.table().is_in_flight(present) ||
        jobs_.is_being_saved(blocks_[present])) {
      ++counted_.skipped_present;
      if (blocks_[present].state == FrameState::kSealed) blocks_.note_present(present);
      return kNoFrame;
    }
    blocks_.free_key(present);
  }
  using Room = Reclaimer::Room;
  constexpr auto kMayRevoke = Reclaimer::MayRevoke::kYes;
  const Room room =
      may_refuse == BlockStore::MayRefuse::kYes
          ? reclaimer_.make_room(space.shape, steps, kMayRevoke, {.space = space.id, .key = key})
          : reclaimer_.make_room(space.shape, steps, kMayRevoke);
  if (room == Room::kLater && no_room == BlockStore::NoRoom::kStop) return std::nullopt;
  if (room != Room::kThere) {
    ++(room == Room::kRefused ? counted_.skipped_refused : counted_.skipped_no_room);
    blocks_.remember_loss(space.id, key, Miss::kNoRoom);
    return kNoFrame;
  }
  const std::uint32_t row = add_job();
  const FrameIndex frame = blocks_.take_to_save(space, key, row, depth);
  jobs_.add_frame(row, frame);
  return frame;
}

std::span<const FrameIndex> Writer::frames_of(HolderId holder, const JobId& id) const {
  const std::uint32_t row = jobs_.find(id);
  const Holder* const caller = holders_.known(holder);
  if (row == JobTable::kNone || caller == nullptr || caller->shards != jobs_[row].shards() ||
      !jobs_.may_publish(row)) {
    return {};
  }
  const ShardWriter* const writer = jobs_.writer(row, caller->shard);
  if (writer == nullptr || writer->holder != caller) return {};
  return jobs_[row].frames;
}

std::optional<SpaceId> Writer::space_of_job(const JobId& id) const {
  const std::uint32_t row = jobs_.find(id);
  if (row == JobTable::kNone || !jobs_.may_publish(row)) return std::nullopt;
  return jobs_[row].space_id;
}

bool Writer::is_saving(const JobId& id) const {
  const std::uint32_t row = jobs_.find(id);
  return row != JobTable::kNone && jobs_.may_publish(row);
}

Result<std::size_t> Writer::publish(HolderId holder, const JobId& id, std::size_t limit) {
  const std::uint32_t row = jobs_.find(id);
  const Holder* const caller = holders_.known(holder);
  const ShardWriter* const writer =
      row == JobTable::kNone || caller == nullptr || caller->shards != jobs_[row].shards()
          ? nullptr
          : jobs_.writer(row, caller->shard);
  if (writer == nullptr || writer->holder != caller) {
    return fail(Errc::kGone, "job {} has no reservation of this holder", id.number);
  }
  if (!jobs_.may_publish(row)) {
    ++counted_.late_publishes;
    abandon(holder, id);
    return fail(Errc::kGone, "job {} was forgotten", id.number);
  }
  if (!writer->has_published) jobs_.publish(row, caller->shard);
  if (jobs_[row].published != jobs_[row].shards()) return 0;
  if (!jobs_.all_know_all(row)) {
    // A shard did not get some of the frames, so nothing was written for it.
    abandon(holder, id);
    return fail(Errc::kGone, "the ranks of job {} reserved different keys", id.number);
  }

  const std::vector<FrameIndex>& frames = jobs_[row].frames;
  blocks_.read_clock();
  // From the last one on: it should be evicted first.
  const std::size_t count = std::min(limit, frames.size());
  for (std::size_t i = 0; i < count; ++i) {
    constexpr std::size_t kAhead = 8;
    const std::size_t last = frames.size() - 1;
    if (last >= 2 * kAhead) blocks_.table().prefetch_block(frames[last - 2 * kAhead]);
    if (last >= kAhead) blocks_.table().prefetch_name(frames[last - kAhead]);
    const FrameIndex frame = jobs_.pop_frame(row);
    blocks_.seal(frame, caller->writer_tag);
  }
  counted_.insertions += count;
  const std::size_t left = frames.size();
  if (left == 0) jobs_.finish(row);
  return left;
}

void Writer::abandon(HolderId holder, const JobId& id) {
  const std::uint32_t row = jobs_.find(id);
  const Holder* const caller = holders_.known(holder);
  if (row == JobTable::kNone || caller == nullptr || caller->shards != jobs_[row].shards()) return;
  const ShardWriter* const writer = jobs_.writer(row, caller->shard);
  if (writer == nullptr ? caller->shards == 1 : writer->holder != caller) return;
  const bool is_done = writer != nullptr && writer->has_published;  // Forgetting the job ends it.
  if (jobs_[row].fate == Job::Fate::kLive) reclaimer_.forget_job(row);
  if (!is_done) reclaimer_.end_shard(row, caller->shard);
  reclaimer_.do_slice();
}

void Writer::expire() {
  const TimePoint now = clock_.now();
  for (std::uint32_t i = 0; i < options_.slice_blocks; ++i) {
    const std::uint32_t row = jobs_.first_due();
    if (row == JobTable::kNone || jobs_[row].deadline > now) return;
    if (jobs_[row].fate == Job::Fate::kLive) {
      ++counted_.reservations_timed_out;
      jobs_.leave_due(row);
      reclaimer_.forget_job(row);
    } else {
      jobs_.leave_due(row);
      reclaimer_.end_job_if_over(row);
    }
  }
}

std::optional<TimePoint> Writer::next_deadline() const {
  const std::uint32_t row = jobs_.first_due();
  if (row == JobTable::kNone) return std::nullopt;
  return jobs_[row].deadline;
}

void Writer::report(BlockStore::Stats& stats) const {
  using Fate = Job::Fate;
  stats.quarantined_bytes += jobs_.bytes(Fate::kForgotten) + jobs_.bytes(Fate::kWriterLost);
  stats.reserved = jobs_.frames(Fate::kLive) + jobs_.frames(Fate::kEnded);
  stats.quarantined_timeout = jobs_.frames(Fate::kForgotten);
  stats.quarantined_writer_lost = jobs_.frames(Fate::kWriterLost);
  stats.reservations = jobs_.live_count();
  stats.insertions = counted_.insertions;
  stats.skipped_present = counted_.skipped_present;
  stats.skipped_no_room = counted_.skipped_no_room;
  stats.skipped_refused = counted_.skipped_refused;
  stats.reservations_timed_out = counted_.reservations_timed_out;
  stats.late_publishes = counted_.late_publishes;
}

}  // namespace pegaflow::engine
