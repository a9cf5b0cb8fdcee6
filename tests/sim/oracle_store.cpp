#include "tests/sim/oracle_store.h"

#include <algorithm>
#include <cstring>

#include "engine/tables/flat_index.h"
#include "engine/tables/frame_list.h"

namespace pegaflow::sim {

std::uint32_t OracleStore::name_hash(engine::SpaceId space, const BlockKey& key) {
  std::uint64_t second = 0;
  std::memcpy(&second, key.bytes.data() + sizeof second, sizeof second);
  return engine::mix_hash(key.hash(),
                          second + static_cast<std::uint64_t>(space) * 0x9E3779B97F4A7C15ULL);
}

OracleStore::OracleStore(const engine::BlockStore::Options& options, const Clock& clock)
    : options_(options), clock_(clock) {
  // Units are the largest power of two of which the pool has 64, at least one page of 4 KiB.
  unit_bytes_ = 4096;
  while (unit_bytes_ * 2 * 64 <= options.pool_bytes) unit_bytes_ *= 2;
  units_ = static_cast<std::uint32_t>((options.pool_bytes + unit_bytes_ - 1) / unit_bytes_);
  rows_a_unit_ = static_cast<std::uint32_t>(unit_bytes_ / 4096);
  frames_.resize(std::size_t{units_} * rows_a_unit_);
  rows_ = engine::BlockRows::create(frames_.size()).value();
}

// ---- namespace generations and holders

void OracleStore::add_space(engine::SpaceId space, engine::ShapeId shape) {
  if (!live_spaces_.emplace(space, shape).second)
    throw Mismatch{"a namespace generation was made twice"};
}

void OracleStore::set_shard(engine::HolderId holder, std::uint32_t shard, std::uint32_t shards) {
  holders_.at(holder).shard = shard;
  holders_.at(holder).shards = shards;
}

void OracleStore::retire_space(engine::SpaceId space) {
  if (live_spaces_.erase(space) == 0) return;
  queue_.push_back({.kind = Kind::kRetire, .space = space});
  const auto sweep = std::find_if(queue_.begin(), queue_.end(),
                                  [](const Work& work) { return work.kind == Kind::kDeadSweep; });
  if (sweep == queue_.end()) {
    queue_.push_back({.kind = Kind::kDeadSweep});
  } else if (sweep->next != 0) {
    sweep->again = true;
  }
  slice();
}

void OracleStore::add_holder(engine::HolderId holder, std::uint32_t instance,
                             const Id128& process) {
  if (!holders_.emplace(holder, Holder{instance, process}).second) {
    throw Mismatch{"a holder was made twice"};
  }
}

void OracleStore::holder_lost(engine::HolderId holder) {
  if (!is_active(holder)) return;
  holders_.at(holder).lost = true;
  queue_.push_back({.kind = Kind::kLeave, .holder = holder});
  slice();
}

bool OracleStore::may_touch(engine::HolderId holder) const {
  const auto is_its = [&](const Pin& pin) { return pin.holder == holder; };
  const auto writes = [&](const Job& job) {
    return std::any_of(job.writers.begin(), job.writers.end(), [&](const Writer& writer) {
      return writer.part == Part::kWriting && writer.holder == holder;
    });
  };
  return is_known(holder) && (std::any_of(pins_.begin(), pins_.end(), is_its) ||
                              std::any_of(jobs_.begin(), jobs_.end(), writes));
}

void OracleStore::holder_gone(engine::HolderId holder) {
  if (!is_known(holder)) return;
  holders_.at(holder).gone = true;
  queue_.push_back({.kind = Kind::kLeave, .holder = holder});
  slice();
}

bool OracleStore::is_known(engine::HolderId holder) const {
  const auto found = holders_.find(holder);
  return found != holders_.end() && !found->second.gone;
}

bool OracleStore::is_active(engine::HolderId holder) const {
  return is_known(holder) && !holders_.at(holder).lost;
}
// ---- changes of state

OracleStore::Order& OracleStore::order_of(engine::FrameIndex frame) {
  const OneShape& shape = shapes_.at(extent_of(frame)->shape);
  return frames_[frame].is_replica ? *shape.replicas : *shape.order;
}

engine::FrameIndex OracleStore::victim(engine::ShapeId shape) {
  std::uint32_t frame = shapes_.at(shape).replicas->victim();
  if (frame == engine::EvictionPolicy::kNone) frame = shapes_.at(shape).order->victim();
  const auto is_of_shape = [&](engine::FrameIndex each) { return extent_of(each)->shape == shape; };
  if (frame == engine::EvictionPolicy::kNone) {
    if (std::any_of(evictable_.begin(), evictable_.end(), is_of_shape)) {
      throw Mismatch{"there is no victim, and a block is evictable"};
    }
    return engine::kNoFrame;
  }
  if (frames_.at(frame).state != State::kSealed || frames_[frame].holds != 0 ||
      !is_of_shape(frame)) {
    throw Mismatch{"the victim is not evictable"};
  }
  return frame;
}

void OracleStore::seal(engine::FrameIndex frame, const Id128& writer) {
  frames_[frame].state = State::kSealed;
  frames_[frame].writer = writer;
  order_of(frame).seal(frame, name_hash(frames_[frame].space, frames_[frame].key));
  became_evictable(frame);
  if (frames_[frame].holds == 0) return;
  evictable_.remove(frame);
  order_of(frame).take(frame);
}

void OracleStore::hold(engine::FrameIndex frame) {
  if (frames_[frame].is_fetched()) {
    ++frames_[frame].holds;
    return;
  }
  if (frames_[frame].holds++ != 0) return order_of(frame).use_again(frame);
  evictable_.remove(frame);
  order_of(frame).take(frame);
}

void OracleStore::make_evictable(engine::FrameIndex frame) {
  order_of(frame).release(frame);
  became_evictable(frame);
}

void OracleStore::became_evictable(engine::FrameIndex frame) {
  frames_[frame].last_use = ++uses_;
  evictable_.push_back(frame);
  if (busy(*extent_of(frame)) == 0) ++quiet_;
}

void OracleStore::give_back(engine::FrameIndex frame) {
  if (--frames_[frame].holds != 0) return;
  if (frames_[frame].is_fetched()) {
    if (frames_[frame].state == State::kQuiesced) free(frame);
    return;
  }
  make_evictable(frame);
  if (!frames_[frame].has_key) return free(frame);  // Invalidated, and counted then.
  if (!live_spaces_.contains(frames_[frame].space)) {
    ++counted_.retired;
    free(frame);
  }
}

void OracleStore::free(engine::FrameIndex frame, engine::EvictionPolicy::Freed why) {
  const bool was_written = frames_[frame].is_written();
  if (!was_written) order_of(frame).free(frame, why);
  evictable_.remove(frame);
  frames_[frame] = {};
  const Extent& extent = *extent_of(frame);
  if (was_written && busy(extent) == 0) ++quiet_;
  const engine::FrameIndex begin = first_frame(extent);
  const bool is_empty =
      std::all_of(frames_.begin() + begin, frames_.begin() + begin + extent.frames,
                  [](const Frame& each) { return each.state == State::kFree; });
  if (is_empty) extents_.remove_if([&](const Extent& each) { return &each == &extent; });
}

void OracleStore::evict(engine::FrameIndex frame, engine::EvictionPolicy::Freed why) {
  if (live_spaces_.contains(frames_[frame].space)) {
    ++counted_.evictions;
    if (frames_[frame].is_replica) ++counted_.evicted_replicas;
    return free(frame, why);
  }
  ++counted_.retired;  // Its generation was reset: no reader will want it again.
  free(frame);
}

void OracleStore::forget(Job& job) {
  const bool left = std::any_of(job.writers.begin(), job.writers.end(), [&](const Writer& writer) {
    return writer.part == Part::kWriting && !is_active(writer.holder);
  });
  job.fate = left ? Fate::kWriterLost : Fate::kForgotten;
  for (Writer& writer : job.writers) {
    if (writer.part == Part::kPublished) writer = {Part::kDone};
    if (writer.part == Part::kWriting) writer.listed = next_serial_++;
  }
  if (job.writers.size() == 1 || job.count(Part::kDone) == job.writers.size()) job.due = false;
  end_if_over(job);
}

void OracleStore::end_shard(Job& job, std::uint32_t shard) {
  job.writers[shard] = {Part::kDone};
  if (job.count(Part::kDone) == job.writers.size()) job.due = false;
  end_if_over(job);
}

void OracleStore::end_if_over(Job& job) {
  if (job.count(Part::kWriting) != 0) return;
  if (job.fate != Fate::kEnded) {
    job.fate = Fate::kEnded;
    job.queued = !job.frames.empty();
    if (job.queued) queue_.push_back({.kind = Kind::kFreeJob, .job = job.serial});
  }
  job.named = job.due;
  if (job.named || job.queued || !job.frames.empty()) return;
  jobs_.remove_if([&](const Job& each) { return &each == &job; });
}

void OracleStore::end_claim(std::uint64_t serial) {
  const auto claim = std::find_if(claims_.begin(), claims_.end(),
                                  [&](const Claim& each) { return each.serial == serial; });
  queue_.push_back({.kind = Kind::kGiveBack, .blocks = claim->blocks});
  claims_.erase(claim);
}

void OracleStore::end_group_of(std::uint64_t serial) {
  std::vector<std::uint64_t> younger;
  std::vector<std::uint64_t> older;
  const auto first = std::find_if(claims_.begin(), claims_.end(),
                                  [&](const Claim& each) { return each.serial == serial; });
  for (const Claim& each : claims_) {
    if (first->group == 0 || each.group != first->group || each.serial == serial) continue;
    (each.serial > serial ? younger : older).push_back(each.serial);
  }
  end_claim(serial);
  for (const std::uint64_t each : younger) end_claim(each);
  for (const std::uint64_t each : older) end_claim(each);
}

void OracleStore::end_pin(engine::HolderId holder, engine::PinId name) {
  const auto pin = std::find_if(pins_.begin(), pins_.end(), [&](const Pin& each) {
    return each.holder == holder && each.name == name;
  });
  std::vector<engine::FrameIndex> blocks = std::move(pin->blocks);
  pins_.erase(pin);
  if (blocks.size() > engine::FrameList::kInside) {
    queue_.push_back({.kind = Kind::kGiveBack, .blocks = std::move(blocks)});
    return;
  }
  step_cost_ = blocks.size();
  for (; !blocks.empty(); blocks.pop_back()) give_back(blocks.back());
}

// ---- statistics

bool OracleStore::is_idle() const {
  return std::all_of(frames_.begin(), frames_.end(),
                     [](const Frame& frame) { return !frame.is_written() && frame.holds == 0; });
}

engine::BlockStore::Stats OracleStore::stats() const {
  engine::BlockStore::Stats stats = counted_;
  for (engine::FrameIndex frame = 0; frame < frames_.size(); ++frame) {
    stats.sealed += frames_[frame].state == State::kSealed ? 1 : 0;
    stats.sealed_bytes += frames_[frame].state == State::kSealed ? bytes_of(frame) : 0;
    stats.written_bytes += frames_[frame].is_written() ? bytes_of(frame) : 0;
    stats.replicas += frames_[frame].is_replica ? 1 : 0;
    if (frames_[frame].is_fetched()) {
      const bool is_in_flight = frames_[frame].state == State::kInFlight;
      ++(is_in_flight ? stats.in_flight : stats.quarantined_fetch);
      stats.fetch_bytes += bytes_of(frame);
      stats.quarantined_bytes += is_in_flight ? 0 : bytes_of(frame);
    }
    stats.held += frames_[frame].holds != 0 ? 1 : 0;
  }
  stats.free_units = units_;
  for (const Extent& extent : extents_) {
    for (const Run& run : extent.runs) stats.free_units -= run.count;
  }
  for (const Job& job : jobs_) {
    const auto frames = static_cast<std::uint32_t>(job.frames.size());
    std::uint64_t bytes = 0;
    for (const engine::FrameIndex frame : job.frames) bytes += bytes_of(frame);
    if (job.fate == Fate::kLive) ++stats.reservations;
    if (job.fate == Fate::kForgotten) {
      stats.quarantined_timeout += frames;
      stats.quarantined_bytes += bytes;
    } else if (job.fate == Fate::kWriterLost) {
      stats.quarantined_writer_lost += frames;
      stats.quarantined_bytes += bytes;
    } else {
      stats.reserved += frames;
    }
  }
  for (const Pin& pin : pins_) {
    if (holders_.at(pin.holder).lost) stats.pinned_by_lost_readers += pin.blocks.size();
  }
  for (const Lease& lease : leases_) {
    ++stats.leases;
    stats.lent += lease.blocks.size();
    for (const engine::FrameIndex frame : lease.blocks) stats.lent_bytes += bytes_of(frame);
  }
  if (!leases_.empty()) stats.oldest_lease = leases_.front().made;
  stats.held_bytes = held_on_server();
  stats.claims = claims_.size();
  stats.pins = pins_.size();
  if (!pins_.empty()) stats.oldest_pin = pins_.front().opened;
  return stats;
}

}  // namespace pegaflow::sim
