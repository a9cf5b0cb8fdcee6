// The model's jobs: their reservations, and how they end.

#include <algorithm>

#include <fmt/format.h>

#include "tests/sim/oracle_store.h"

namespace pegaflow::sim {

std::size_t OracleStore::Job::count(Part part) const {
  return static_cast<std::size_t>(std::count_if(
      writers.begin(), writers.end(), [&](const Writer& writer) { return writer.part == part; }));
}

bool OracleStore::is_doomed(const Job& job) const {
  const auto left = [&](const Writer& writer) {
    return (writer.part == Part::kWriting || writer.part == Part::kPublished) &&
           !is_active(writer.holder);
  };
  return job.fate != Fate::kLive || !live_spaces_.contains(job.space) ||
         std::any_of(job.writers.begin(), job.writers.end(), left);
}

OracleStore::Job* OracleStore::job_of(const JobId& id) {
  for (Job& job : jobs_) {
    if (job.id == id && job.named) return &job;
  }
  return nullptr;
}

bool OracleStore::is_saving(const JobId& id) {
  const Job* const job = job_of(id);
  return job != nullptr && !is_doomed(*job);
}

OracleStore::Job* OracleStore::job_of(std::uint64_t serial) {
  for (Job& job : jobs_) {
    if (job.serial == serial) return &job;
  }
  throw Mismatch{"the model has lost a job"};
}

OracleStore::Room OracleStore::make_room(engine::ShapeId shape, std::size_t& steps, bool may_revoke,
                                         const std::uint32_t* saved) {
  while (!has_free(shape) && !grow(shape)) {
    const engine::FrameIndex own = victim(shape);
    start_exchange(shape, own);
    if (steps != 0 && (own == engine::kNoFrame || shapes_.at(shape).leaving_for_it != 0)) {
      if (queue_.empty()) {
        if (claims_.empty() || !may_revoke) return Room::kNone;
        // The oldest claim, but before all others the oldest that was not opened within the grace.
        const auto unopened = std::find_if(claims_.begin(), claims_.end(), [&](const Claim& claim) {
          return !claim.opened && clock_.now() - claim.made >= options_.claim_grace;
        });
        end_group_of(unopened != claims_.end() ? unopened->serial : claims_.front().serial);
        ++counted_.claims_revoked;
      }
      if (step()) --steps;
      continue;
    }
    const Room otherwise = shapes_.at(shape).leaving_for_it != 0 ? Room::kLater : Room::kNone;
    if (own == engine::kNoFrame) return otherwise;
    if (extent_of(own)->leaving) {
      if (steps == 0) return otherwise;
      --steps;
    } else if (saved != nullptr && !frames_[own].is_replica &&
               shapes_.at(shape).order->refuses(*saved)) {
      return Room::kRefused;
    }
    evict(own, engine::EvictionPolicy::Freed::kEvicted);
  }
  return Room::kThere;
}

Result<std::vector<engine::FrameIndex>> OracleStore::reserve(
    engine::HolderId holder, engine::SpaceId space, const JobId& job_id, std::size_t first,
    std::span<const BlockKey> keys, const Result<std::vector<engine::FrameIndex>>& chosen,
    engine::BlockStore::NoRoom no_room, engine::BlockStore::MayRefuse may_refuse) {
  if (!is_active(holder)) return fail(Errc::kGone, "holder");
  if (!live_spaces_.contains(space)) return fail(Errc::kGone, "space");
  const Holder& who = holders_.at(holder);
  Job* job = job_of(job_id);
  if (job != nullptr) {
    if (is_doomed(*job)) return fail(Errc::kGone, "job");
    if (job->writers.size() != who.shards || job->space != space) {
      return fail(Errc::kInvalidArgument, "job");
    }
    const Writer& own = job->writers[who.shard];
    if (own.part == Part::kPublished) return fail(Errc::kInvalidArgument, "published");
    if (own.part == Part::kWriting && own.holder != holder) {
      return fail(Errc::kInvalidArgument, "another holder");
    }
  } else if (jobs_.size() == options_.max_reservations) {
    return fail(Errc::kBusy, "jobs");
  }
  const auto make_job = [&] {
    if (job == nullptr) {
      jobs_.push_back({.serial = next_serial_++,
                       .id = job_id,
                       .space = space,
                       .deadline = clock_.now() + options_.reservation_timeout,
                       .writers = std::vector<Writer>(who.shards)});
      job = &jobs_.back();
    }
    Writer& own = job->writers[who.shard];
    if (own.part == Part::kNotAsked) own = {Part::kWriting, holder, 0, next_serial_++};
  };
  const bool shared = who.shards > 1;
  if (shared) {
    const bool takes_part = job != nullptr && job->writers[who.shard].part == Part::kWriting;
    if (first > (takes_part ? job->writers[who.shard].asked : 0)) {
      return fail(Errc::kInvalidArgument, "first");
    }
    make_job();
  }
  if (!chosen) throw Mismatch{"reserve does not answer"};
  const engine::ShapeId shape = live_spaces_.at(space);
  std::vector<engine::FrameIndex> frames;
  std::size_t steps = options_.slice_blocks;
  const bool refuses = may_refuse == engine::BlockStore::MayRefuse::kYes;
  if (job_id != last_reserved_) uses_ += shapes_.at(shape).order->save_begins(refuses);
  last_reserved_ = job_id;
  const auto decide = [&](const BlockKey& key, std::size_t i) -> std::optional<engine::FrameIndex> {
    if (const engine::FrameIndex present = find(space, key); present != engine::kNoFrame) {
      if (is_readable(present) || frames_[present].state == State::kInFlight ||
          (frames_[present].state == State::kWritten &&
           !is_doomed(*job_of(frames_[present].job)))) {
        ++counted_.skipped_present;
        return engine::kNoFrame;
      }
      move_key(present);
    }
    const std::uint32_t name = name_hash(space, key);
    const Room room = make_room(shape, steps, true, refuses ? &name : nullptr);
    if (room == Room::kLater && no_room == engine::BlockStore::NoRoom::kStop) return std::nullopt;
    if (room != Room::kThere) {
      ++(room == Room::kRefused ? counted_.skipped_refused : counted_.skipped_no_room);
      return engine::kNoFrame;
    }
    const engine::FrameIndex choice = i < chosen->size() ? (*chosen)[i] : engine::kNoFrame;
    take(choice, shape);
    make_job();
    frames_[choice] = {.state = State::kWritten,
                       .space = space,
                       .key = key,
                       .has_key = true,
                       .writer = who.writer(),
                       .job = job->serial};
    job->frames.push_back(choice);
    return choice;
  };
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (shared && first + i < job->answers.size()) {
      frames.push_back(job->answers[first + i]);
      continue;
    }
    const auto decided = decide(keys[i], i);
    if (!decided) break;
    frames.push_back(*decided);
    if (shared) job->answers.push_back(frames.back());
  }
  if (shared) {
    job->writers[who.shard].asked = std::max(job->writers[who.shard].asked, first + frames.size());
  }
  return frames;
}

void OracleStore::move_key(engine::FrameIndex present) {
  if (frames_[present].state == State::kSealed) {
    evict(present);  // Its extent is leaving.
  } else {
    frames_[present].has_key = false;  // Forgotten: the key may be reserved in another frame.
  }
}

void OracleStore::take(engine::FrameIndex choice, engine::ShapeId shape) {
  Extent* const extent = choice < frames_.size() ? extent_of(choice) : nullptr;
  if (extent == nullptr || extent->shape != shape || extent->leaving ||
      choice - first_frame(*extent) >= extent->frames || frames_[choice].state != State::kFree) {
    throw Mismatch{
        fmt::format("a key got {}, which is no free frame of its shape",
                    choice == engine::kNoFrame ? "none" : fmt::format("frame {}", choice))};
  }
  extent->touched = std::max(extent->touched, choice - first_frame(*extent) + 1);
}

Result<std::size_t> OracleStore::publish(engine::HolderId holder, const JobId& job_id,
                                         std::size_t limit) {
  Job* const job = job_of(job_id);
  if (job == nullptr || !is_known(holder)) return fail(Errc::kGone, "unknown");
  const Holder& who = holders_.at(holder);
  if (job->writers.size() != who.shards) return fail(Errc::kGone, "unknown");
  Writer& own = job->writers[who.shard];
  if ((own.part != Part::kWriting && own.part != Part::kPublished) || own.holder != holder) {
    return fail(Errc::kGone, "unknown");
  }
  if (is_doomed(*job)) {
    ++counted_.late_publishes;
    abandon(holder, job_id);
    return fail(Errc::kGone, "forgotten");
  }
  own.part = Part::kPublished;
  if (job->count(Part::kPublished) != job->writers.size()) return 0;
  const auto knows_all = [&](const Writer& writer) { return writer.asked == job->answers.size(); };
  if (job->writers.size() > 1 &&
      !std::all_of(job->writers.begin(), job->writers.end(), knows_all)) {
    abandon(holder, job_id);
    return fail(Errc::kGone, "different keys");
  }
  while (limit-- != 0 && !job->frames.empty()) {
    const engine::FrameIndex frame = job->frames.back();
    job->frames.pop_back();
    seal(frame, who.writer());
    ++counted_.insertions;
  }
  const std::size_t left = job->frames.size();
  if (left == 0) jobs_.remove_if([&](const Job& each) { return &each == job; });
  return left;
}

void OracleStore::abandon(engine::HolderId holder, const JobId& job_id) {
  Job* const job = job_of(job_id);
  if (job == nullptr || !is_known(holder)) return;
  const Holder& who = holders_.at(holder);
  if (job->writers.size() != who.shards) return;
  const Writer& own = job->writers[who.shard];
  const bool takes_part = own.part == Part::kWriting || own.part == Part::kPublished;
  if (takes_part ? own.holder != holder : who.shards == 1) return;
  const bool is_done = own.part == Part::kPublished;
  const std::uint64_t serial = job->serial;
  if (job->fate == Fate::kLive) forget(*job);
  if (!is_done) end_shard(*job_of(serial), who.shard);
  slice();
}

void OracleStore::expire() {
  for (std::size_t i = 0; i < options_.slice_blocks && !leases_.empty(); ++i) {
    const auto first = std::min_element(
        leases_.begin(), leases_.end(),
        [](const Lease& left, const Lease& right) { return left.end < right.end; });
    if (first->end > clock_.now()) break;
    ++counted_.leases_expired;
    queue_.push_back({.kind = Kind::kGiveBack, .blocks = first->blocks});
    leases_.erase(first);
  }
  for (std::size_t i = 0; i < options_.slice_blocks; ++i) {
    const auto first =
        std::find_if(jobs_.begin(), jobs_.end(), [](const Job& job) { return job.due; });
    if (first == jobs_.end() || first->deadline > clock_.now()) return;
    first->due = false;
    if (first->fate == Fate::kLive) {
      ++counted_.reservations_timed_out;
      forget(*first);
    } else {
      end_if_over(*first);
    }
  }
}

std::optional<TimePoint> OracleStore::next_deadline() const {
  std::optional<TimePoint> first;
  for (const Lease& lease : leases_) first = std::min(first.value_or(lease.end), lease.end);
  for (const Job& job : jobs_) {
    if (job.due) first = std::min(first.value_or(job.deadline), job.deadline);
  }
  return first;
}

}  // namespace pegaflow::sim
