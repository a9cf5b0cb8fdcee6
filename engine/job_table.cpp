#include "engine/job_table.h"

#include <utility>

#include "base/assert.h"

namespace pegaflow {

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

std::uint32_t JobTable::add(const JobId& id, Holder& holder, Space& space, TimePoint deadline) {
  const std::uint32_t row = rows_.add();
  by_id_.insert(hash(id), row);
  Job& job = rows_[row];
  job.id = id;
  job.holder = &holder;
  job.space = &space;
  job.space_id = space.id;
  job.deadline = deadline;
  by_deadline_.push_back(rows_, row);
  holder.live_jobs.push_back(rows_, row);
  space.jobs.push_back(rows_, row);
  return row;
}

void JobTable::add_slot(std::uint32_t row, SlotIndex slot) {
  rows_[row].slots.push_back(slot);
  ++slots_of(Job::Fate::kLive);
}

SlotIndex JobTable::pop_slot(std::uint32_t row) {
  Job& job = rows_[row];
  PEGA_ASSERT(!job.slots.empty(), "job {} has no slot left", job.id.number);
  const SlotIndex slot = job.slots.back();
  job.slots.pop_back();
  --slots_of(job.fate);
  return slot;
}

void JobTable::leave_live(Job& job, std::uint32_t row) {
  by_deadline_.erase(rows_, row);
  job.space->jobs.erase(rows_, row);
  job.space = nullptr;
  job.holder->live_jobs.erase(rows_, row);
}

void JobTable::set_fate(Job& job, Job::Fate fate) {
  slots_of(job.fate) -= static_cast<std::uint32_t>(job.slots.size());
  slots_of(fate) += static_cast<std::uint32_t>(job.slots.size());
  job.fate = fate;
}

void JobTable::forget(std::uint32_t row, Job::Fate fate) {
  Job& job = rows_[row];
  PEGA_ASSERT(job.fate == Job::Fate::kLive, "job {} was forgotten twice", job.id.number);
  leave_live(job, row);
  job.holder->forgotten_jobs.push_back(rows_, row);
  set_fate(job, fate);
}

void JobTable::end(std::uint32_t row) {
  Job& job = rows_[row];
  PEGA_ASSERT(job.fate != Job::Fate::kEnded, "job {} was ended twice", job.id.number);
  if (job.fate == Job::Fate::kLive) {
    leave_live(job, row);
  } else {
    job.holder->forgotten_jobs.erase(rows_, row);
  }
  job.holder = nullptr;
  by_id_.erase(hash(job.id), row);
  set_fate(job, Job::Fate::kEnded);
}

void JobTable::remove(std::uint32_t row) {
  PEGA_ASSERT(rows_[row].fate == Job::Fate::kEnded && rows_[row].slots.empty(),
              "job {} still has {} slots", rows_[row].id.number, rows_[row].slots.size());
  rows_.remove(row);
}

}  // namespace pegaflow
