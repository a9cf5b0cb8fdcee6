// The model's queue of work.

#include <algorithm>

#include "tests/sim/oracle_store.h"

namespace pegaflow::sim {

bool OracleStore::work() {
  slice();
  return has_work();
}

void OracleStore::start_cleanup() {
  const bool under_way = std::any_of(queue_.begin(), queue_.end(),
                                     [](const Work& work) { return work.kind == Kind::kCleanup; });
  if (!under_way) {
    cleanup_ = {};
    queue_.push_back({.kind = Kind::kCleanup});
  }
  slice();
}

void OracleStore::slice() {
  for (std::size_t i = 0; i < options_.slice_blocks; i += step_cost_) {
    if (!step()) return;
  }
}

bool OracleStore::step() {
  step_cost_ = 1;
  while (!queue_.empty()) {
    if (step(queue_.front())) return true;
    queue_.pop_front();
  }
  return false;
}

bool OracleStore::step(Work& work) {
  switch (work.kind) {
    case Kind::kGiveBack: {
      if (work.blocks.empty()) return false;
      const engine::FrameIndex frame =
          work.blocks.back();  // The end of a chain becomes evictable first.
      work.blocks.pop_back();
      give_back(frame);
      return true;
    }
    case Kind::kFreeJob: {
      Job* const job = job_of(work.job);
      if (job->frames.empty()) {
        job->queued = false;
        end_if_over(*job);
        return false;
      }
      free(job->frames.back());
      job->frames.pop_back();
      return true;
    }
    case Kind::kLeave:
      return step_leave(work.holder);
    case Kind::kRetire:
      return step_retire(work.space);
    case Kind::kDeadSweep:
      return step_dead_sweep(work);
    case Kind::kCleanup:
      return step_cleanup(work);
    case Kind::kLeaving:
      return step_leaving(work);
  }
  return false;
}

bool OracleStore::step_dead_sweep(Work& work) {
  if (next_touched(work.next) == engine::kNoFrame && work.again) work = {.kind = Kind::kDeadSweep};
  const engine::FrameIndex frame = next_touched(work.next);
  if (frame == engine::kNoFrame) return false;
  work.next = frame + 1;
  const Frame& content = frames_[frame];
  if (content.state == State::kSealed && content.holds == 0 &&
      !live_spaces_.contains(content.space)) {
    ++counted_.retired;
    free(frame);
  }
  return true;
}

bool OracleStore::step_cleanup(Work& work) {
  const engine::FrameIndex frame = next_touched(work.next);
  if (frame == engine::kNoFrame) {
    cleanup_.done = true;
    return false;
  }
  work.next = frame + 1;
  const Frame& content = frames_[frame];
  if (content.state == State::kSealed && content.holds == 0) {
    ++(live_spaces_.contains(content.space) ? counted_.cleaned : counted_.retired);
    ++cleanup_.evicted_blocks;
    cleanup_.evicted_bytes += bytes_of(frame);
    free(frame);
  } else if (content.state != State::kFree) {
    ++cleanup_.still_referenced_blocks;
  }
  return true;
}

bool OracleStore::step_leaving(Work& work) {
  while (const Extent* const extent = extent_with(work.extent)) {
    if (work.next >= extent->touched) throw Mismatch{"an extent leaves with blocks in it"};
    const engine::FrameIndex frame = first_frame(*extent) + work.next++;
    if (frames_[frame].state != State::kSealed) continue;
    evict(frame);
    return true;
  }
  --shapes_.at(work.for_shape).leaving_for_it;
  return false;
}

bool OracleStore::step_leave(engine::HolderId holder) {
  if (!holders_.contains(holder)) return false;
  for (const Claim& claim : claims_) {
    if (claim.holder != holder) continue;
    end_claim(claim.serial);
    return true;
  }
  const bool gone = holders_.at(holder).gone;
  const std::uint32_t shard = holders_.at(holder).shard;
  // Live ones first, then those forgotten first.
  const auto first_job = [&](bool live) {
    Job* first = nullptr;
    for (Job& job : jobs_) {
      if ((job.fate == Fate::kLive) != live || shard >= job.writers.size()) continue;
      const Writer& own = job.writers[shard];
      const bool takes_part = own.part == Part::kWriting || own.part == Part::kPublished;
      if (!takes_part || own.holder != holder) continue;
      if (first == nullptr || own.listed < first->writers[shard].listed) first = &job;
    }
    return first;
  };
  if (Job* const job = first_job(true)) {
    const std::uint64_t serial = job->serial;
    const bool ends_now = gone && job->writers[shard].part == Part::kWriting;
    forget(*job);
    if (ends_now) end_shard(*job_of(serial), shard);
    return true;
  }
  if (!gone) return false;
  if (Job* const job = first_job(false)) {
    end_shard(*job, shard);
    return true;
  }
  for (const Pin& pin : pins_) {
    if (pin.holder != holder) continue;
    end_pin(pin.holder, pin.name);
    return true;
  }
  holders_.erase(holder);
  return false;
}

bool OracleStore::step_retire(engine::SpaceId space) {
  for (const Claim& claim : claims_) {
    if (claim.space != space) continue;
    ++counted_.claims_revoked;
    end_group_of(claim.serial);
    return true;
  }
  for (Job& job : jobs_) {
    if (job.space != space || job.fate != Fate::kLive) continue;
    forget(job);
    return true;
  }
  return false;
}

}  // namespace pegaflow::sim
