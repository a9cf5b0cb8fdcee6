// Processes, their connections and their ends; time, resets and the work between calls.

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "tests/sim/world.h"
#include "tests/sim/world_words.h"

namespace pegaflow::sim {

void World::connect() {
  if (connections_.size() >= 12) return;
  std::size_t process = processes_.size();
  if (!processes_.empty() && chance(0.4)) process = pick(processes_.size());
  if (process == processes_.size() || processes_[process].killed) {
    process = processes_.size();
    const auto instance = static_cast<std::uint32_t>(chance(0.5) ? kShared : pick(3));
    processes_.push_back(
        {Id128{1, process + 1}, instance, static_cast<std::uint32_t>(pick(shards_of(instance)))});
  }
  const engine::HolderId holder =
      store_->add_holder(processes_[process].instance, processes_[process].incarnation);
  oracle_->add_holder(holder, processes_[process].instance, processes_[process].incarnation);
  const std::uint32_t shards = shards_of(processes_[process].instance);
  store_->set_shard(holder, processes_[process].shard, shards);
  oracle_->set_shard(holder, processes_[process].shard, shards);
  note("connect holder={} process={} instance={} shard={} of={}", number(holder), process,
       processes_[process].instance, processes_[process].shard, shards);
  connections_.push_back({holder, process});
}

void World::lose_connection() {
  const auto who = pick_talking();
  if (!who) return;
  connections_[*who].lost = true;
  note("lost holder={}", number(connections_[*who].holder));
  store_->holder_lost(connections_[*who].holder);
  oracle_->holder_lost(connections_[*who].holder);
  coverage_.hit("lost");
}

void World::end_copies_of(engine::HolderId holder, bool whole) {
  for (Save& save : saves_) {
    if (save.holder != holder || save.copies_ended) continue;
    for (const Page& page : save.pages) memory_->end_write(page.place, page.stamp, whole);
    save.copies_ended = true;
  }
  for (Load& load : loads_) {
    if (load.holder != holder || load.copies_ended) continue;
    for (const Page& page : load.pages) memory_->end_read(page.place);
    load.copies_ended = true;
  }
}

void World::end_process() {
  // Killed: every copy of the process stops where it is. The ends of its connections are detected
  // one after the other, and each may be lost before it is gone.
  const std::size_t process = pick(processes_.size());
  if (!processes_[process].killed) {
    note("process {} ends", process);
    processes_[process].killed = true;
    for (const Connection& connection : connections_) {
      if (connection.process == process) end_copies_of(connection.holder, false);
    }
    coverage_.hit("process ended");
  }
  for (std::size_t i = connections_.size(); i-- > 0;) {
    if (processes_[connections_[i].process].killed && chance(0.7)) holder_gone(i);
  }
}

void World::quiesce() {
  // The same incarnation reports that all copies of a former connection ended.
  if (connections_.empty()) return;
  const std::size_t which = pick(connections_.size());
  if (!may_speak(connections_[which].holder)) return;
  if (!connections_[which].lost && chance(0.7)) return;
  end_copies_of(connections_[which].holder, true);
  coverage_.hit("quiesced");
  holder_gone(which);
}

void World::holder_gone(std::size_t which) {
  const engine::HolderId holder = connections_[which].holder;
  connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(which));
  note("gone holder={}", number(holder));
  store_->holder_gone(holder);
  oracle_->holder_gone(holder);
  forget_records_of(holder);
  former_holders_.push_back(holder);
}

void World::forget_records_of(engine::HolderId holder) {
  std::erase_if(saves_, [&](const Save& save) { return save.holder == holder; });
  std::erase_if(loads_, [&](const Load& load) { return load.holder == holder; });
  for (const Claim& claim : claims_) {
    if (claim.holder == holder) former_tokens_.push_back(claim.token);
  }
  std::erase_if(claims_, [&](const Claim& claim) { return claim.holder == holder; });
}

// ---- time, resets, work

void World::reset_space() {
  OneSpace& space = spaces_[pick(spaces_.size())];
  note("retire space={}", number(space.id));
  store_->retire_space(space.id);
  oracle_->retire_space(space.id);
  former_spaces_.push_back(space.id);
  space.id = store_->make_space(space.shape);
  shape_of_space_[space.id] = space.shape;
  oracle_->add_space(space.id, space.shape);
  coverage_.hit("reset");
}

void World::pass_time() {
  const auto by = std::chrono::milliseconds(chance(0.2) ? 20000 : 100 + pick(900));
  note("time passes: {} ms", by.count());
  clock_.advance(by);
  end_late_reads();
}

void World::expire() {
  note("expire");
  store_->expire();
  oracle_->expire();
}

void World::work() {
  note("work");
  if (store_->work() != oracle_->work()) throw Mismatch{"work() ends at another slice"};
}

void World::start_cleanup() {
  note("cleanup");
  store_->start_cleanup();
  oracle_->start_cleanup();
  coverage_.hit("cleanup");
}

// ---- the end

void World::shut_down() {
  note("shut down");
  // In any order: killed, lost first, or quiesced.
  while (!connections_.empty()) {
    const std::size_t which = pick(connections_.size());
    const engine::HolderId holder = connections_[which].holder;
    end_copies_of(holder, chance(0.5));
    if (chance(0.5)) {
      store_->holder_lost(holder);
      oracle_->holder_lost(holder);
    }
    holder_gone(which);
    compare();
  }
  // Fetches end, and leases: ended by the readers, or expired.
  while (!bringing_.empty()) bring();
  while (!loans_.empty() && chance(0.9)) end_lease();
  clock_.advance(options_.longest_lease + options_.lease_margin);
  end_late_reads();
  while (store_->stats().leases != 0) expire();
  loans_.clear();
  while (store_->has_work()) {
    work();
    compare();
  }
  const engine::BlockStore::Stats stats = store_->stats();
  if (!store_->is_idle() || stats.pins != 0 || stats.leases != 0 || stats.fetch_bytes != 0 ||
      stats.claims != 0 || stats.reservations != 0 || stats.used_bytes != stats.sealed_bytes) {
    throw Mismatch{"something is left after the end of all processes"};
  }
  start_cleanup();
  while (store_->has_work()) work();
  compare();
  if (store_->stats().free_units != store_->stats().units || !store_->cleanup().done) {
    throw Mismatch{"a unit is not free after cleanup"};
  }
  if (!memory_->is_quiet()) throw Mismatch{"a free page is being accessed"};
  coverage_.hit("evictions, " + std::string(to_string(options_.eviction)), stats.evictions);
  coverage_.hit("evicted replicas", stats.evicted_replicas);
  coverage_.hit("fetched", stats.fetched);
  coverage_.hit("fetches joined", stats.fetches_joined);
  coverage_.hit("fetches without room", stats.fetches_no_room);
  coverage_.hit("leases expired", stats.leases_expired);
  coverage_.hit("leases shortened", stats.leases_shortened);
  coverage_.hit("extents taken", stats.extents_taken);
  coverage_.hit("retired", stats.retired);
  coverage_.hit("cleaned", store_->stats().cleaned);
  coverage_.hit("skipped, present", stats.skipped_present);
  coverage_.hit("skipped, no room", stats.skipped_no_room);
  coverage_.hit("skipped, refused", stats.skipped_refused);
  coverage_.hit("claims revoked", stats.claims_revoked);
  coverage_.hit("claims shortened", stats.claims_shortened);
  coverage_.hit("reservations timed out", stats.reservations_timed_out);
  coverage_.hit("late publishes", stats.late_publishes);
}

}  // namespace pegaflow::sim
