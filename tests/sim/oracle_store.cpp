#include "tests/sim/oracle_store.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace pegaflow::sim {

OracleStore::OracleStore(const BlockStore::Options& options, const Clock& clock)
    : options_(options), clock_(clock), slots_(options.slot_count) {}

// ---- spaces and holders

Result<void> OracleStore::recut(std::uint32_t slot_count) {
  if (!is_at_rest()) return fail(Errc::kBusy, "not at rest");
  counted_.evictions += stats().sealed;
  slots_.assign(slot_count, Slot{});
  options_.slot_count = slot_count;
  touched_ = 0;
  at_rest_.clear();
  std::erase_if(queue_, [](const Work& work) {
    return work.kind == Kind::kDeadSweep || work.kind == Kind::kCleanup;
  });
  cleanup_.done = true;
  return {};
}

void OracleStore::add_space(SpaceId space) {
  if (!live_spaces_.insert(space).second) throw Mismatch{"a space was made twice"};
}

void OracleStore::retire_space(SpaceId space) {
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

void OracleStore::add_holder(HolderId holder, std::uint32_t instance, const Id128& process) {
  if (!holders_.emplace(holder, Holder{instance, process}).second) {
    throw Mismatch{"a holder was made twice"};
  }
}

void OracleStore::holder_lost(HolderId holder) {
  if (!is_active(holder)) return;
  holders_.at(holder).lost = true;
  queue_.push_back({.kind = Kind::kLeave, .holder = holder});
  slice();
}

bool OracleStore::may_touch(HolderId holder) const {
  const auto is_its = [&](const auto& row) { return row.holder == holder; };
  const auto is_its_open = [&](const Job& job) {
    return job.holder == holder && job.fate != Fate::kEnded;
  };
  return is_known(holder) && (std::any_of(pins_.begin(), pins_.end(), is_its) ||
                              std::any_of(jobs_.begin(), jobs_.end(), is_its_open));
}

void OracleStore::holder_gone(HolderId holder) {
  if (!is_known(holder)) return;
  holders_.at(holder).gone = true;
  queue_.push_back({.kind = Kind::kLeave, .holder = holder});
  slice();
}

bool OracleStore::is_known(HolderId holder) const {
  const auto found = holders_.find(holder);
  return found != holders_.end() && !found->second.gone;
}

bool OracleStore::is_active(HolderId holder) const {
  return is_known(holder) && !holders_.at(holder).lost;
}

// ---- reading

SlotIndex OracleStore::find(SpaceId space, const BlockKey& key) const {
  for (SlotIndex slot = 0; slot < touched_; ++slot) {
    if (slots_[slot].has_key && slots_[slot].space == space && slots_[slot].key == key) return slot;
  }
  return kNoSlot;
}

std::size_t OracleStore::lookup(SpaceId space, std::span<const BlockKey> keys) {
  std::size_t found = 0;
  while (live_spaces_.contains(space) && found < keys.size()) {
    const SlotIndex slot = find(space, keys[found]);
    if (slot == kNoSlot || slots_[slot].state != State::kSealed) break;
    ++found;
  }
  ++counted_.lookups;
  counted_.lookup_hits += found;
  counted_.lookup_misses += keys.size() - found;
  return found;
}

Result<std::size_t> OracleStore::claim(HolderId holder, SpaceId space,
                                       std::span<const BlockKey> keys, const Id128& token) {
  if (!is_active(holder)) return fail(Errc::kGone, "holder");
  if (token.is_none() || claim_of(token) != nullptr) return fail(Errc::kInvalidArgument, "token");
  if (claims_.size() == options_.max_claims) return fail(Errc::kBusy, "claims");
  if (!live_spaces_.contains(space)) return 0;

  const std::uint32_t instance = holders_.at(holder).instance;
  const auto share_of = [&](double share) {
    return static_cast<std::uint64_t>(share * options_.slot_count);
  };
  const std::uint64_t held_before = held_by_instance(instance);
  Claim claim{.serial = next_serial_++,
              .token = token,
              .holder = holder,
              .space = space,
              .made = clock_.now()};
  for (const BlockKey& key : keys) {
    const SlotIndex slot = find(space, key);
    if (slot == kNoSlot || slots_[slot].state != State::kSealed) break;
    const bool over_instance =
        held_before + claim.blocks.size() >= share_of(options_.instance_share);
    const bool over_node =
        slots_[slot].holds == 0 && held_on_node() >= share_of(options_.node_share);
    if (over_instance || over_node) {
      ++counted_.claims_shortened;
      break;
    }
    hold(slot);
    claim.blocks.push_back(slot);
  }
  const std::size_t count = claim.blocks.size();
  if (count != 0) claims_.push_back(std::move(claim));
  return count;
}

std::uint64_t OracleStore::held_by_instance(std::uint32_t instance) const {
  std::uint64_t held = 0;
  for (const Claim& claim : claims_) {
    if (holders_.at(claim.holder).instance == instance) held += claim.blocks.size();
  }
  for (const Pin& pin : pins_) {
    if (pin.instance == instance && !has_claim(pin.claim)) held += pin.blocks.size();
  }
  return held;
}

std::uint32_t OracleStore::held_on_node() const {
  std::uint32_t held = 0;
  for (const Slot& slot : slots_) held += slot.holds != 0 ? 1 : 0;
  return held;
}

bool OracleStore::has_claim(std::uint64_t serial) const {
  return std::any_of(claims_.begin(), claims_.end(),
                     [&](const Claim& claim) { return claim.serial == serial; });
}

OracleStore::Claim* OracleStore::claim_of(const Id128& token) {
  for (Claim& claim : claims_) {
    if (claim.token == token) return &claim;
  }
  return nullptr;
}

void OracleStore::unclaim(HolderId holder, const Id128& token) {
  const Claim* const claim = claim_of(token);
  if (claim == nullptr || claim->holder != holder) return;
  end_claim(claim->serial);
  slice();
}

Result<BlockStore::OpenedPages> OracleStore::open(HolderId holder, const Id128& token,
                                                  std::size_t first, std::size_t count, PinId pin) {
  if (!is_active(holder)) return fail(Errc::kGone, "holder");
  const auto answer = [&](const Pin& opened) {
    BlockStore::OpenedPages pages{.slots = opened.blocks};
    for (const SlotIndex slot : opened.blocks) {
      if (slots_[slot].writer == holders_.at(holder).process) ++pages.by_this_process;
    }
    return pages;
  };
  for (const Pin& known : pins_) {
    if (known.holder != holder || known.name != pin) continue;
    const bool same = known.token == token && known.first == first && known.blocks.size() == count;
    if (!same) return fail(Errc::kInvalidArgument, "another range");
    return answer(known);
  }
  Claim* const claim = claim_of(token);
  if (claim == nullptr || !is_active(claim->holder) || !live_spaces_.contains(claim->space)) {
    return fail(Errc::kGone, "claim");
  }
  if (count == 0 || first >= claim->blocks.size() || count > claim->blocks.size() - first) {
    return fail(Errc::kInvalidArgument, "range");
  }
  if (pins_.size() == options_.max_pins) return fail(Errc::kBusy, "pins");
  claim->opened = true;
  Pin opened{.holder = holder,
             .name = pin,
             .token = token,
             .first = first,
             .claim = claim->serial,
             .instance = holders_.at(claim->holder).instance,
             .opened = clock_.now()};
  for (std::size_t i = first; i < first + count; ++i) {
    hold(claim->blocks[i]);
    opened.blocks.push_back(claim->blocks[i]);
  }
  pins_.push_back(opened);
  return answer(opened);
}

void OracleStore::release(HolderId holder, PinId pin) {
  if (!is_known(holder)) return;
  const bool exists = std::any_of(pins_.begin(), pins_.end(), [&](const Pin& each) {
    return each.holder == holder && each.name == pin;
  });
  if (!exists) return;
  end_pin(holder, pin);
  slice();
}

// ---- writing

bool OracleStore::is_doomed(const Job& job) const {
  return job.fate != Fate::kLive || !is_active(job.holder) || !live_spaces_.contains(job.space);
}

OracleStore::Job* OracleStore::job_of(const JobId& id) {
  for (Job& job : jobs_) {
    if (job.id == id && job.fate != Fate::kEnded) return &job;
  }
  return nullptr;
}

OracleStore::Job* OracleStore::job_of(std::uint64_t serial) {
  for (Job& job : jobs_) {
    if (job.serial == serial) return &job;
  }
  throw Mismatch{"the model has lost a job"};
}

bool OracleStore::has_free() const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.state == State::kFree; });
}

bool OracleStore::make_room(std::size_t& steps) {
  while (!has_free()) {
    if (!at_rest_.empty()) {
      const SlotIndex victim = at_rest_.front();
      ++(live_spaces_.contains(slots_[victim].space) ? counted_.evictions : counted_.retired);
      free(victim);
      return true;
    }
    if (steps == 0) return false;
    if (queue_.empty()) {
      if (claims_.empty()) return false;
      // The oldest claim, but before all others the oldest that nobody opened within the grace.
      const auto unopened = std::find_if(claims_.begin(), claims_.end(), [&](const Claim& claim) {
        return !claim.opened && clock_.now() - claim.made >= options_.claim_grace;
      });
      end_claim(unopened != claims_.end() ? unopened->serial : claims_.front().serial);
      ++counted_.claims_revoked;
    }
    if (step()) --steps;
  }
  return true;
}

Result<std::vector<SlotIndex>> OracleStore::reserve(HolderId holder, SpaceId space,
                                                    const JobId& job_id,
                                                    std::span<const BlockKey> keys,
                                                    const Result<std::vector<SlotIndex>>& chosen) {
  if (!is_active(holder)) return fail(Errc::kGone, "holder");
  if (!live_spaces_.contains(space)) return fail(Errc::kGone, "space");
  if (const Job* const job = job_of(job_id)) {
    if (is_doomed(*job)) return fail(Errc::kGone, "job");
    if (job->holder != holder || job->space != space) return fail(Errc::kInvalidArgument, "job");
  } else if (jobs_.size() == options_.max_reservations) {
    return fail(Errc::kBusy, "jobs");
  }
  if (!chosen || chosen->size() != keys.size()) {
    throw Mismatch{"reserve does not answer for each key"};
  }
  std::vector<SlotIndex> slots;
  std::size_t steps = options_.slice_blocks;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    slots.push_back(kNoSlot);
    if (const SlotIndex present = find(space, keys[i]); present != kNoSlot) {
      if (slots_[present].state == State::kSealed || !is_doomed(*job_of(slots_[present].job))) {
        ++counted_.skipped_present;
        continue;
      }
      slots_[present].has_key = false;  // Forgotten: the key may be reserved in another slot.
    }
    if (!make_room(steps)) {
      ++counted_.skipped_no_room;
      continue;
    }
    const SlotIndex slot = (*chosen)[i];
    if (slot >= slots_.size() || slots_[slot].state != State::kFree) {
      throw Mismatch{fmt::format("key {} of {} got {}, which is not free", i, keys.size(),
                                 slot == kNoSlot ? "no slot" : fmt::format("slot {}", slot))};
    }
    Job* job = job_of(job_id);
    if (job == nullptr) {
      jobs_.push_back({.serial = next_serial_++,
                       .id = job_id,
                       .holder = holder,
                       .space = space,
                       .deadline = clock_.now() + options_.reservation_timeout});
      job = &jobs_.back();
    }
    slots_[slot] = {.state = State::kWritten,
                    .space = space,
                    .key = keys[i],
                    .has_key = true,
                    .writer = holders_.at(holder).process,
                    .job = job->serial};
    touched_ = std::max(touched_, slot + 1);
    job->slots.push_back(slot);
    slots.back() = slot;
  }
  return slots;
}

Result<std::size_t> OracleStore::publish(HolderId holder, const JobId& job_id, std::size_t limit) {
  Job* const job = job_of(job_id);
  if (job == nullptr || job->holder != holder || !is_known(holder)) {
    return fail(Errc::kGone, "unknown");
  }
  if (is_doomed(*job)) {
    ++counted_.late_publishes;
    end(*job);
    slice();
    return fail(Errc::kGone, "forgotten");
  }
  while (limit-- != 0 && !job->slots.empty()) {
    const SlotIndex slot = job->slots.back();
    job->slots.pop_back();
    slots_[slot].state = State::kSealed;
    at_rest_.push_back(slot);
    ++counted_.insertions;
  }
  const std::size_t left = job->slots.size();
  if (left == 0) jobs_.remove_if([&](const Job& each) { return &each == job; });
  return left;
}

void OracleStore::abandon(HolderId holder, const JobId& job_id) {
  Job* const job = job_of(job_id);
  if (job == nullptr || job->holder != holder || !is_known(holder)) return;
  end(*job);
  slice();
}

void OracleStore::expire() {
  std::size_t left = options_.slice_blocks;
  for (Job& job : jobs_) {
    if (job.fate != Fate::kLive || job.deadline > clock_.now() || left == 0) continue;
    --left;
    ++counted_.reservations_timed_out;
    forget(job);
  }
}

std::optional<TimePoint> OracleStore::next_deadline() const {
  for (const Job& job : jobs_) {
    if (job.fate == Fate::kLive) return job.deadline;
  }
  return std::nullopt;
}

// ---- what changes the state of one thing

void OracleStore::hold(SlotIndex slot) {
  at_rest_.remove(slot);
  ++slots_[slot].holds;
}

void OracleStore::give_back(SlotIndex slot) {
  if (--slots_[slot].holds != 0) return;
  at_rest_.push_back(slot);
  if (!live_spaces_.contains(slots_[slot].space)) {
    ++counted_.retired;
    free(slot);
  }
}

void OracleStore::free(SlotIndex slot) {
  at_rest_.remove(slot);
  slots_[slot] = {};
}

void OracleStore::forget(Job& job) {
  job.fate = is_active(job.holder) ? Fate::kForgotten : Fate::kWriterLost;
  job.forgotten = next_serial_++;
}

void OracleStore::end(Job& job) {
  job.fate = Fate::kEnded;
  queue_.push_back({.kind = Kind::kFreeJob, .job = job.serial});
}

void OracleStore::end_claim(std::uint64_t serial) {
  const auto claim = std::find_if(claims_.begin(), claims_.end(),
                                  [&](const Claim& each) { return each.serial == serial; });
  queue_.push_back({.kind = Kind::kGiveBack, .blocks = claim->blocks});
  claims_.erase(claim);
}

void OracleStore::end_pin(HolderId holder, PinId name) {
  const auto pin = std::find_if(pins_.begin(), pins_.end(), [&](const Pin& each) {
    return each.holder == holder && each.name == name;
  });
  queue_.push_back({.kind = Kind::kGiveBack, .blocks = pin->blocks});
  pins_.erase(pin);
}

// ---- queued work

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
  for (std::size_t i = 0; i < options_.slice_blocks; ++i) {
    if (!step()) return;
  }
}

bool OracleStore::step() {
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
      const SlotIndex slot = work.blocks.back();  // The end of a chain comes to rest first.
      work.blocks.pop_back();
      give_back(slot);
      return true;
    }
    case Kind::kFreeJob: {
      Job* const job = job_of(work.job);
      if (job->slots.empty()) {
        jobs_.remove_if([&](const Job& each) { return &each == job; });
        return false;
      }
      free(job->slots.back());
      job->slots.pop_back();
      return true;
    }
    case Kind::kLeave:
      return step_leave(work.holder);
    case Kind::kRetire:
      return step_retire(work.space);
    case Kind::kDeadSweep: {
      if (work.next >= touched_ && work.again) work = {.kind = Kind::kDeadSweep};
      if (work.next >= touched_) return false;
      const SlotIndex slot = work.next++;
      const Slot& content = slots_[slot];
      if (content.state == State::kSealed && content.holds == 0 &&
          !live_spaces_.contains(content.space)) {
        ++counted_.retired;
        free(slot);
      }
      return true;
    }
    case Kind::kCleanup: {
      if (work.next >= touched_) {
        cleanup_.done = true;
        return false;
      }
      const SlotIndex slot = work.next++;
      const Slot& content = slots_[slot];
      if (content.state == State::kSealed && content.holds == 0) {
        ++(live_spaces_.contains(content.space) ? counted_.cleaned : counted_.retired);
        ++cleanup_.evicted_blocks;
        free(slot);
      } else if (content.state != State::kFree) {
        ++cleanup_.still_referenced_blocks;
      }
      return true;
    }
  }
  return false;
}

bool OracleStore::step_leave(HolderId holder) {
  if (!holders_.contains(holder)) return false;
  for (const Claim& claim : claims_) {
    if (claim.holder != holder) continue;
    end_claim(claim.serial);
    return true;
  }
  const bool gone = holders_.at(holder).gone;
  for (Job& job : jobs_) {
    if (job.holder != holder || job.fate != Fate::kLive) continue;
    gone ? end(job) : forget(job);
    return true;
  }
  if (!gone) return false;
  // Those forgotten first come back first.
  Job* first = nullptr;
  for (Job& job : jobs_) {
    if (job.holder != holder || job.fate == Fate::kEnded) continue;
    if (first == nullptr || job.forgotten < first->forgotten) first = &job;
  }
  if (first != nullptr) {
    end(*first);
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

bool OracleStore::step_retire(SpaceId space) {
  for (const Claim& claim : claims_) {
    if (claim.space != space) continue;
    ++counted_.claims_revoked;
    end_claim(claim.serial);
    return true;
  }
  for (Job& job : jobs_) {
    if (job.space != space || job.fate != Fate::kLive) continue;
    forget(job);
    return true;
  }
  return false;
}

// ---- what can be counted

bool OracleStore::is_at_rest() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.state != State::kWritten && slot.holds == 0;
  });
}

BlockStore::Stats OracleStore::stats() const {
  BlockStore::Stats stats = counted_;
  for (const Slot& slot : slots_) {
    stats.free += slot.state == State::kFree ? 1 : 0;
    stats.sealed += slot.state == State::kSealed ? 1 : 0;
  }
  for (const Job& job : jobs_) {
    const auto slots = static_cast<std::uint32_t>(job.slots.size());
    if (job.fate == Fate::kLive) ++stats.reservations;
    if (job.fate == Fate::kForgotten) {
      stats.quarantined_timeout += slots;
    } else if (job.fate == Fate::kWriterLost) {
      stats.quarantined_writer_lost += slots;
    } else {
      stats.reserved += slots;
    }
  }
  for (const Pin& pin : pins_) {
    if (holders_.at(pin.holder).lost) stats.pinned_by_lost_readers += pin.blocks.size();
  }
  stats.held = held_on_node();
  stats.claims = claims_.size();
  stats.pins = pins_.size();
  if (!pins_.empty()) stats.oldest_pin = pins_.front().opened;
  return stats;
}

}  // namespace pegaflow::sim
