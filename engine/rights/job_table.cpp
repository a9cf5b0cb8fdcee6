#include "engine/rights/job_table.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace pegaflow::engine {

namespace {

std::uint32_t hash(const JobId& id) noexcept {
  return mix_hash(id.scheduler.high ^ id.scheduler.low, id.number);
}

}  // namespace

Result<JobTable> JobTable::create(std::uint32_t max_jobs) {
  PEGA_TRY_LET(auto by_id, FlatIndex::create(max_jobs));
  return JobTable(max_jobs, std::move(by_id));
}

JobTable::JobTable(std::uint32_t max_jobs, FlatIndex by_id)
    : max_jobs_(max_jobs), by_id_(std::move(by_id)) {}

std::uint32_t JobTable::find(const JobId& id) const {
  return by_id_.find(hash(id), [&](std::uint32_t row) { return rows_[row].id == id; });
}

std::uint32_t JobTable::add(const JobId& id, std::uint32_t shards, Space& space, const Shape& shape,
                            std::uint64_t frame_bytes, TimePoint deadline) {
  const std::uint32_t row = rows_.add();
  by_id_.insert(hash(id), row);
  Job& job = rows_[row];
  job.id = id;
  job.space = &space;
  job.space_id = space.id;
  job.frame_bytes = frame_bytes;
  job.deadline = deadline;
  job.is_named = true;
  job.is_due = true;
  job.writers.assign(shards, Job::kNotRequested);
  for (std::uint32_t shard = 0; shard < std::min<std::size_t>(shards, shape.shards.size());
       ++shard) {
    if (shape.shards[shard].page_bytes != 0) continue;
    job.writers[shard] = Job::kNoPage;
    ++job.published;
    ++job.done;
  }
  by_deadline_.push_back(rows_, row);
  space.jobs.push_back(rows_, row);
  ++live_;
  return row;
}

void JobTable::add_writer(std::uint32_t row, Holder& holder) {
  Job& job = rows_[row];
  PEGA_ASSERT(job.writers[holder.shard] == Job::kNotRequested, "shard {} of job {} is added twice",
              holder.shard, job.id.number);
  const std::uint32_t number = writers_.add();
  writers_[number].holder = &holder;
  writers_[number].job = row;
  holder.live_writers.push_back(writers_, number);
  job.writers[holder.shard] = number;
  ++holder.writing;
  ++job.writing;
}

void JobTable::note_requested(std::uint32_t row, std::uint32_t shard, std::size_t keys) {
  ShardWriter& writer = writers_[rows_[row].writers[shard]];
  writer.requested = std::max(writer.requested, keys);
}

bool JobTable::all_know_all(std::uint32_t row) const {
  const Job& job = rows_[row];
  if (job.shards() == 1) return true;
  return std::all_of(job.writers.begin(), job.writers.end(), [&](std::uint32_t number) {
    return number == Job::kNoPage ||
           (Job::is_row(number) && writers_[number].requested == job.answers.size());
  });
}

const ShardWriter* JobTable::writer(std::uint32_t row, std::uint32_t shard) const {
  const std::uint32_t number = rows_[row].writers[shard];
  return Job::is_row(number) ? &writers_[number] : nullptr;
}

template <typename Is>
bool JobTable::any_writer(const Job& job, Is&& is) const {
  return std::any_of(job.writers.begin(), job.writers.end(), [&](std::uint32_t number) {
    return Job::is_row(number) && is(writers_[number]);
  });
}

bool JobTable::may_publish(std::uint32_t row) const {
  const Job& job = rows_[row];
  if (job.fate != Job::Fate::kLive || job.space->is_retired) return false;
  return !any_writer(job, [](const ShardWriter& writer) {
    return writer.holder->is_lost || writer.holder->is_gone;
  });
}

void JobTable::count(const Job& job, std::size_t frames, bool more) noexcept {
  const auto fate = static_cast<std::size_t>(job.fate);
  const std::uint64_t bytes = frames * job.frame_bytes;
  frames_[fate] += more ? static_cast<std::uint32_t>(frames) : -static_cast<std::uint32_t>(frames);
  bytes_[fate] += more ? bytes : -bytes;
}

void JobTable::add_frame(std::uint32_t row, FrameIndex frame) {
  rows_[row].frames.push_back(frame);
  count(rows_[row], 1, true);
}

FrameIndex JobTable::pop_frame(std::uint32_t row) {
  Job& job = rows_[row];
  PEGA_ASSERT(!job.frames.empty(), "job {} has no frame left", job.id.number);
  const FrameIndex frame = job.frames.back();
  job.frames.pop_back();
  count(job, 1, false);
  return frame;
}

void JobTable::set_fate(Job& job, Job::Fate fate) {
  count(job, job.frames.size(), false);
  job.fate = fate;
  count(job, job.frames.size(), true);
}

void JobTable::publish(std::uint32_t row, std::uint32_t shard) {
  Job& job = rows_[row];
  ShardWriter& writer = writers_[job.writers[shard]];
  PEGA_ASSERT(!writer.has_published, "shard {} of job {} published twice", shard, job.id.number);
  writer.has_published = true;
  --writer.holder->writing;
  --job.writing;
  ++job.published;
}

void JobTable::drop_writer(Job& job, std::uint32_t shard,
                           IndexList<&ShardWriter::of_holder>& list) {
  const std::uint32_t number = job.writers[shard];
  list.erase(writers_, number);
  if (!writers_[number].has_published) {
    --writers_[number].holder->writing;
    --job.writing;
  }
  writers_.remove(number);
  job.writers[shard] = Job::kDone;
  ++job.done;
}

void JobTable::leave_live(Job& job, std::uint32_t row) {
  job.space->jobs.erase(rows_, row);
  job.space = nullptr;
  --live_;
}

void JobTable::forget(std::uint32_t row) {
  Job& job = rows_[row];
  PEGA_ASSERT(job.fate == Job::Fate::kLive, "job {} was forgotten twice", job.id.number);
  const bool has_left = any_writer(job, [](const ShardWriter& writer) {
    return !writer.has_published && (writer.holder->is_lost || writer.holder->is_gone);
  });
  leave_live(job, row);
  set_fate(job, has_left ? Job::Fate::kWriterLost : Job::Fate::kForgotten);
  for (std::uint32_t shard = 0; shard < job.shards(); ++shard) {
    const std::uint32_t number = job.writers[shard];
    if (!Job::is_row(number)) continue;
    ShardWriter& writer = writers_[number];
    if (writer.has_published) {
      drop_writer(job, shard, writer.holder->live_writers);
    } else {
      writer.holder->live_writers.erase(writers_, number);
      writer.holder->forgotten_writers.push_back(writers_, number);
    }
  }
  job.published = 0;
  // No shard is left that could reserve late, so the name is not needed.
  if (job.shards() == 1 || job.done == job.shards()) leave_due(row);
}

void JobTable::end_shard(std::uint32_t row, std::uint32_t shard) {
  Job& job = rows_[row];
  PEGA_ASSERT(job.fate != Job::Fate::kLive, "job {} is not forgotten", job.id.number);
  if (job.writers[shard] == Job::kDone || job.writers[shard] == Job::kNoPage) return;
  if (job.writers[shard] == Job::kNotRequested) {
    job.writers[shard] = Job::kDone;
    ++job.done;
  } else {
    drop_writer(job, shard, writers_[job.writers[shard]].holder->forgotten_writers);
  }
  if (job.done == job.shards()) leave_due(row);
  unname_if_over(job, row);
}

void JobTable::end(std::uint32_t row) {
  PEGA_ASSERT(rows_[row].writing == 0, "job {} is still written", rows_[row].id.number);
  set_fate(rows_[row], Job::Fate::kEnded);
  unname_if_over(rows_[row], row);
}

void JobTable::leave_due(std::uint32_t row) {
  Job& job = rows_[row];
  if (!std::exchange(job.is_due, false)) return;
  by_deadline_.erase(rows_, row);
  unname_if_over(job, row);
}

void JobTable::unname_if_over(Job& job, std::uint32_t row) {
  if (job.fate == Job::Fate::kLive || job.writing != 0 || job.is_due || !job.is_named) return;
  by_id_.erase(hash(job.id), row);
  job.is_named = false;
}

void JobTable::finish(std::uint32_t row) {
  Job& job = rows_[row];
  PEGA_ASSERT(job.fate == Job::Fate::kLive && job.published == job.shards() && job.frames.empty(),
              "job {} is not published", job.id.number);
  for (std::uint32_t shard = 0; shard < job.shards(); ++shard) {
    if (!has_page(row, shard)) continue;
    drop_writer(job, shard, writers_[job.writers[shard]].holder->live_writers);
  }
  leave_live(job, row);
  job.fate = Job::Fate::kEnded;
  leave_due(row);
  const bool removed = remove_if_unused(row);
  PEGA_ASSERT(removed, "a job is published and still in use");
}

bool JobTable::remove_if_unused(std::uint32_t row) {
  const Job& job = rows_[row];
  if (job.fate != Job::Fate::kEnded || job.is_named || job.is_queued || !job.frames.empty()) {
    return false;
  }
  rows_.remove(row);
  return true;
}

}  // namespace pegaflow::engine
