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
  slots_a_unit_ = static_cast<std::uint32_t>(unit_bytes_ / 4096);
  slots_.resize(std::size_t{units_} * slots_a_unit_);
  rows_ = engine::BlockRows::create(slots_.size()).value();
}

// ---- spaces and holders

void OracleStore::add_space(engine::SpaceId space, engine::ShapeId shape) {
  if (!live_spaces_.emplace(space, shape).second) throw Mismatch{"a space was made twice"};
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
// ---- what changes the state of one thing

OracleStore::Order& OracleStore::order_of(engine::FrameIndex slot) {
  const OneShape& shape = shapes_.at(extent_of(slot)->shape);
  return slots_[slot].is_replica ? *shape.replicas : *shape.order;
}

engine::FrameIndex OracleStore::victim(engine::ShapeId shape) {
  std::uint32_t slot = shapes_.at(shape).replicas->victim();
  if (slot == engine::EvictionPolicy::kNone) slot = shapes_.at(shape).order->victim();
  const auto is_of_shape = [&](engine::FrameIndex each) { return extent_of(each)->shape == shape; };
  if (slot == engine::EvictionPolicy::kNone) {
    if (std::any_of(at_rest_.begin(), at_rest_.end(), is_of_shape)) {
      throw Mismatch{"no block goes next, and one is at rest"};
    }
    return engine::kNoFrame;
  }
  if (slots_.at(slot).state != State::kSealed || slots_[slot].holds != 0 || !is_of_shape(slot)) {
    throw Mismatch{"a block goes next that is not at rest"};
  }
  return slot;
}

void OracleStore::seal(engine::FrameIndex slot, const Id128& writer) {
  slots_[slot].state = State::kSealed;
  slots_[slot].writer = writer;
  order_of(slot).seal(slot, name_hash(slots_[slot].space, slots_[slot].key));
  came_to_rest(slot);
  if (slots_[slot].holds == 0) return;
  at_rest_.remove(slot);
  order_of(slot).take(slot);
}

void OracleStore::hold(engine::FrameIndex slot) {
  if (slots_[slot].is_fetched()) {
    ++slots_[slot].holds;
    return;
  }
  if (slots_[slot].holds++ != 0) return order_of(slot).use_again(slot);
  at_rest_.remove(slot);
  order_of(slot).take(slot);
}

void OracleStore::rest(engine::FrameIndex slot) {
  order_of(slot).rest(slot);
  came_to_rest(slot);
}

void OracleStore::came_to_rest(engine::FrameIndex slot) {
  slots_[slot].last_use = ++uses_;
  at_rest_.push_back(slot);
  if (busy(*extent_of(slot)) == 0) ++quiet_;
}

void OracleStore::give_back(engine::FrameIndex slot) {
  if (--slots_[slot].holds != 0) return;
  if (slots_[slot].is_fetched()) {
    if (slots_[slot].state == State::kOver) free(slot);
    return;
  }
  rest(slot);
  if (!slots_[slot].has_key) return free(slot);  // Condemned, and counted then.
  if (!live_spaces_.contains(slots_[slot].space)) {
    ++counted_.retired;
    free(slot);
  }
}

void OracleStore::free(engine::FrameIndex slot, engine::EvictionPolicy::Freed why) {
  const bool was_written = slots_[slot].is_written();
  if (!was_written) order_of(slot).free(slot, why);
  at_rest_.remove(slot);
  slots_[slot] = {};
  const Extent& extent = *extent_of(slot);
  if (was_written && busy(extent) == 0) ++quiet_;
  const engine::FrameIndex begin = first_slot(extent);
  const bool is_empty = std::all_of(slots_.begin() + begin, slots_.begin() + begin + extent.frames,
                                    [](const Slot& each) { return each.state == State::kFree; });
  if (is_empty) extents_.remove_if([&](const Extent& each) { return &each == &extent; });
}

void OracleStore::evict(engine::FrameIndex slot, engine::EvictionPolicy::Freed why) {
  if (live_spaces_.contains(slots_[slot].space)) {
    ++counted_.evictions;
    if (slots_[slot].is_replica) ++counted_.evicted_replicas;
    return free(slot, why);
  }
  ++counted_.retired;  // Its space was reset: nobody will come back for it.
  free(slot);
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
  settle(job);
}

void OracleStore::end_shard(Job& job, std::uint32_t shard) {
  job.writers[shard] = {Part::kDone};
  if (job.count(Part::kDone) == job.writers.size()) job.due = false;
  settle(job);
}

void OracleStore::settle(Job& job) {
  if (job.count(Part::kWriting) != 0) return;
  if (job.fate != Fate::kEnded) {
    job.fate = Fate::kEnded;
    job.queued = !job.slots.empty();
    if (job.queued) queue_.push_back({.kind = Kind::kFreeJob, .job = job.serial});
  }
  job.named = job.due;
  if (job.named || job.queued || !job.slots.empty()) return;
  jobs_.remove_if([&](const Job& each) { return &each == &job; });
}

void OracleStore::end_claim(std::uint64_t serial) {
  const auto claim = std::find_if(claims_.begin(), claims_.end(),
                                  [&](const Claim& each) { return each.serial == serial; });
  queue_.push_back({.kind = Kind::kGiveBack, .blocks = claim->blocks});
  claims_.erase(claim);
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

// ---- what can be counted

bool OracleStore::is_at_rest() const {
  return std::all_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return !slot.is_written() && slot.holds == 0; });
}

engine::BlockStore::Stats OracleStore::stats() const {
  engine::BlockStore::Stats stats = counted_;
  for (engine::FrameIndex slot = 0; slot < slots_.size(); ++slot) {
    stats.sealed += slots_[slot].state == State::kSealed ? 1 : 0;
    stats.sealed_bytes += slots_[slot].state == State::kSealed ? bytes_of(slot) : 0;
    stats.written_bytes += slots_[slot].is_written() ? bytes_of(slot) : 0;
    stats.replicas += slots_[slot].is_replica ? 1 : 0;
    if (slots_[slot].is_fetched()) {
      const bool is_coming = slots_[slot].state == State::kComing;
      ++(is_coming ? stats.coming : stats.quarantined_fetch);
      stats.fetch_bytes += bytes_of(slot);
      stats.quarantined_bytes += is_coming ? 0 : bytes_of(slot);
    }
    stats.held += slots_[slot].holds != 0 ? 1 : 0;
  }
  stats.free_units = units_;
  for (const Extent& extent : extents_) {
    for (const Run& run : extent.runs) stats.free_units -= run.count;
  }
  for (const Job& job : jobs_) {
    const auto slots = static_cast<std::uint32_t>(job.slots.size());
    std::uint64_t bytes = 0;
    for (const engine::FrameIndex slot : job.slots) bytes += bytes_of(slot);
    if (job.fate == Fate::kLive) ++stats.reservations;
    if (job.fate == Fate::kForgotten) {
      stats.quarantined_timeout += slots;
      stats.quarantined_bytes += bytes;
    } else if (job.fate == Fate::kWriterLost) {
      stats.quarantined_writer_lost += slots;
      stats.quarantined_bytes += bytes;
    } else {
      stats.reserved += slots;
    }
  }
  for (const Pin& pin : pins_) {
    if (holders_.at(pin.holder).lost) stats.pinned_by_lost_readers += pin.blocks.size();
  }
  for (const Lease& lease : leases_) {
    ++stats.leases;
    stats.lent += lease.blocks.size();
    for (const engine::FrameIndex slot : lease.blocks) stats.lent_bytes += bytes_of(slot);
  }
  if (!leases_.empty()) stats.oldest_lease = leases_.front().made;
  stats.held_bytes = held_on_node();
  stats.claims = claims_.size();
  stats.pins = pins_.size();
  if (!pins_.empty()) stats.oldest_pin = pins_.front().opened;
  return stats;
}

}  // namespace pegaflow::sim
