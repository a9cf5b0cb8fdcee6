#include <algorithm>

#include "base/assert.h"
#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

std::span<const FrameIndex> BlockStore::frames_of(HolderId holder, const JobId& id) const {
  const JobTable& jobs = impl_->jobs;
  const std::uint32_t row = jobs.find(id);
  const Holder* const caller = impl_->known_holder(holder);
  if (row == JobTable::kNone || caller == nullptr || caller->shards != jobs[row].shards() ||
      !impl_->may_publish(jobs[row])) {
    return {};
  }
  const Writer* const writer = jobs.writer(row, caller->shard);
  if (writer == nullptr || writer->holder != caller) return {};
  return jobs[row].frames;
}

bool BlockStore::is_saving(const JobId& id) const {
  const std::uint32_t row = impl_->jobs.find(id);
  return row != JobTable::kNone && impl_->may_publish(impl_->jobs[row]);
}

Result<std::size_t> BlockStore::publish(HolderId holder, const JobId& id, std::size_t limit) {
  JobTable& jobs = impl_->jobs;
  const std::uint32_t row = jobs.find(id);
  const Holder* const caller = impl_->known_holder(holder);
  const Writer* const writer =
      row == JobTable::kNone || caller == nullptr || caller->shards != jobs[row].shards()
          ? nullptr
          : jobs.writer(row, caller->shard);
  if (writer == nullptr || writer->holder != caller) {
    return fail(Errc::kGone, "job {} has no reservation of this holder", id.number);
  }
  if (!impl_->may_publish(jobs[row])) {
    ++impl_->counted.late_publishes;
    abandon(holder, id);
    return fail(Errc::kGone, "job {} was forgotten", id.number);
  }
  if (!writer->has_published) jobs.publish(row, caller->shard);
  if (jobs[row].published != jobs[row].shards()) return 0;
  if (!jobs.all_know_all(row)) {
    // A shard did not get some of the frames, so nothing was written for it.
    abandon(holder, id);
    return fail(Errc::kGone, "the ranks of job {} reserved different keys", id.number);
  }

  const std::vector<FrameIndex>& frames = jobs[row].frames;
  impl_->read_clock();
  // From the last one on: it should be evicted first.
  const std::size_t count = std::min(limit, frames.size());
  for (std::size_t i = 0; i < count; ++i) {
    constexpr std::size_t kAhead = 8;
    const std::size_t last = frames.size() - 1;
    if (last >= 2 * kAhead) impl_->blocks.prefetch_block(frames[last - 2 * kAhead]);
    if (last >= kAhead) impl_->blocks.prefetch_name(frames[last - kAhead]);
    const FrameIndex frame = jobs.pop_frame(row);
    impl_->blocks.seal(frame, caller->writer_tag, impl_->second);
    impl_->note(frame, true);
  }
  impl_->counted.insertions += count;
  const std::size_t left = frames.size();
  if (left == 0) jobs.finish(row);
  return left;
}

void BlockStore::abandon(HolderId holder, const JobId& id) {
  JobTable& jobs = impl_->jobs;
  const std::uint32_t row = jobs.find(id);
  const Holder* const caller = impl_->known_holder(holder);
  if (row == JobTable::kNone || caller == nullptr || caller->shards != jobs[row].shards()) return;
  const Writer* const writer = jobs.writer(row, caller->shard);
  if (writer == nullptr ? caller->shards == 1 : writer->holder != caller) return;
  const bool is_done = writer != nullptr && writer->has_published;  // Forgetting the job ends it.
  if (jobs[row].fate == Job::Fate::kLive) impl_->forget_job(row);
  if (!is_done) impl_->end_shard(row, caller->shard);
  impl_->do_slice();
}

void BlockStore::Impl::forget_job(std::uint32_t row) {
  const std::vector<std::uint32_t>& writers = jobs[row].writers;
  const bool has_left = std::any_of(writers.begin(), writers.end(), [&](std::uint32_t number) {
    if (number == Job::kNotRequested || number == Job::kDone) return false;
    const Writer& writer = jobs.writer_row(number);
    return !writer.has_published && (writer.holder->is_lost || writer.holder->is_gone);
  });
  jobs.forget(row, has_left ? Job::Fate::kWriterLost : Job::Fate::kForgotten);
  end_job_if_over(row);
}

void BlockStore::Impl::end_shard(std::uint32_t row, std::uint32_t shard) {
  jobs.end_shard(row, shard);
  end_job_if_over(row);
}

void BlockStore::Impl::end_job_if_over(std::uint32_t row) {
  if (jobs[row].writing != 0) return;
  if (jobs[row].fate != Job::Fate::kEnded) {
    jobs.end(row);
    if (!jobs[row].frames.empty()) {
      jobs.set_queued(row, true);
      queue.emplace_back(FreeJobWork{row});
    }
  }
  jobs.remove_if_unused(row);
}

void BlockStore::expire() {
  impl_->expire_leases();
  const TimePoint now = impl_->clock.now();
  JobTable& jobs = impl_->jobs;
  for (std::uint32_t i = 0; i < impl_->options.slice_blocks; ++i) {
    const std::uint32_t row = jobs.first_due();
    if (row == JobTable::kNone || jobs[row].deadline > now) return;
    if (jobs[row].fate == Job::Fate::kLive) {
      ++impl_->counted.reservations_timed_out;
      jobs.leave_due(row);
      impl_->forget_job(row);
    } else {
      jobs.leave_due(row);
      impl_->end_job_if_over(row);
    }
  }
}

std::optional<TimePoint> BlockStore::next_deadline() const {
  const std::uint32_t job = impl_->jobs.first_due();
  const std::uint32_t lease = impl_->leases.first_due();
  std::optional<TimePoint> first;
  if (job != JobTable::kNone) first = impl_->jobs[job].deadline;
  if (lease != LeaseTable::kNone) {
    const TimePoint end = impl_->leases[lease].end;
    first = std::min(first.value_or(end), end);
  }
  return first;
}

}  // namespace pegaflow::engine
