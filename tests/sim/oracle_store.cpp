#include "tests/sim/oracle_store.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace pegaflow::sim {

OracleStore::OracleStore(const BlockStore::Options& options, const Clock& clock)
    : options_(options), clock_(clock) {
  // Units are the largest power of two of which the pool has 64, at least one page of 4 KiB.
  unit_bytes_ = 4096;
  while (unit_bytes_ * 2 * 64 <= options.pool_bytes) unit_bytes_ *= 2;
  units_ = static_cast<std::uint32_t>((options.pool_bytes + unit_bytes_ - 1) / unit_bytes_);
  slots_a_unit_ = static_cast<std::uint32_t>(unit_bytes_ / 4096);
  slots_.resize(std::size_t{units_} * slots_a_unit_);
}

// ---- spaces and holders

void OracleStore::add_space(SpaceId space, ShapeId shape) {
  if (!live_spaces_.emplace(space, shape).second) throw Mismatch{"a space was made twice"};
}

void OracleStore::set_shard(HolderId holder, std::uint32_t shard, std::uint32_t shards) {
  holders_.at(holder).shard = shard;
  holders_.at(holder).shards = shards;
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
  const auto is_its = [&](const Pin& pin) { return pin.holder == holder; };
  const auto writes = [&](const Job& job) {
    return std::any_of(job.writers.begin(), job.writers.end(), [&](const Writer& writer) {
      return writer.part == Part::kWriting && writer.holder == holder;
    });
  };
  return is_known(holder) && (std::any_of(pins_.begin(), pins_.end(), is_its) ||
                              std::any_of(jobs_.begin(), jobs_.end(), writes));
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
  for (SlotIndex slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].has_key && slots_[slot].space == space && slots_[slot].key == key) return slot;
  }
  return kNoSlot;
}

std::size_t OracleStore::lookup(SpaceId space, std::span<const BlockKey> keys) {
  std::size_t found = 0;
  while (live_spaces_.contains(space) && found < keys.size()) {
    const SlotIndex slot = find(space, keys[found]);
    if (!is_readable(slot)) break;
    ++found;
  }
  ++counted_.lookups;
  counted_.lookup_hits += found;
  counted_.lookup_misses += keys.size() - found;
  return found;
}

std::set<BlockKey> OracleStore::sealed(SpaceId space) const {
  std::set<BlockKey> keys;
  for (const Slot& slot : slots_) {
    if (slot.state == State::kSealed && slot.has_key && slot.space == space) keys.insert(slot.key);
  }
  return keys;
}

Result<std::size_t> OracleStore::claim(HolderId holder, SpaceId space,
                                       std::span<const BlockKey> keys, const Id128& token) {
  if (!is_active(holder)) return fail(Errc::kGone, "holder");
  if (token.is_none() || claim_of(token) != nullptr) return fail(Errc::kInvalidArgument, "token");
  if (claims_.size() == options_.max_claims) return fail(Errc::kBusy, "claims");
  if (!live_spaces_.contains(space)) return 0;

  const std::uint32_t instance = holders_.at(holder).instance;
  const auto share_of = [&](double share) {
    return static_cast<std::uint64_t>(share * static_cast<double>(options_.pool_bytes));
  };
  const std::uint64_t frame = shapes_.at(live_spaces_.at(space)).frame_bytes;
  const std::uint64_t held_before = held_by_instance(instance);
  Claim claim{.serial = next_serial_++,
              .token = token,
              .holder = holder,
              .space = space,
              .made = clock_.now()};
  for (const BlockKey& key : keys) {
    const SlotIndex slot = find(space, key);
    if (!is_readable(slot)) break;
    const bool over_instance =
        held_before + (claim.blocks.size() + 1) * frame > share_of(options_.instance_share);
    const bool over_node =
        slots_[slot].holds == 0 && held_on_node() + frame > share_of(options_.node_share);
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
    if (holders_.at(claim.holder).instance != instance) continue;
    for (const SlotIndex slot : claim.blocks) held += bytes_of(slot);
  }
  for (const Pin& pin : pins_) {
    if (pin.instance == instance && !has_claim(pin.claim)) held += pin.bytes;
  }
  return held;
}

std::uint64_t OracleStore::held_on_node() const {
  std::uint64_t held = 0;
  for (SlotIndex slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].holds != 0) held += bytes_of(slot);
  }
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
      if (slots_[slot].writer == holders_.at(holder).writer()) ++pages.by_this_process;
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
    opened.bytes += bytes_of(claim->blocks[i]);
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

OracleStore::Job* OracleStore::job_of(std::uint64_t serial) {
  for (Job& job : jobs_) {
    if (job.serial == serial) return &job;
  }
  throw Mismatch{"the model has lost a job"};
}

SlotIndex OracleStore::victim(ShapeId shape) const {
  for (const SlotIndex slot : at_rest_) {
    if (extent_of(slot)->shape == shape) return slot;
  }
  return kNoSlot;
}

bool OracleStore::make_room(ShapeId shape, std::size_t& steps) {
  while (!has_free(shape) && !grow(shape)) {
    const SlotIndex own = victim(shape);
    start_exchange(shape, own);
    if (steps != 0 && (own == kNoSlot || shapes_.at(shape).leaving_for_it != 0)) {
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
      continue;
    }
    if (own == kNoSlot) return false;
    if (extent_of(own)->leaving) {
      if (steps == 0) return false;
      --steps;
    }
    evict(own);
  }
  return true;
}

Result<std::vector<SlotIndex>> OracleStore::reserve(HolderId holder, SpaceId space,
                                                    const JobId& job_id, std::size_t first,
                                                    std::span<const BlockKey> keys,
                                                    const Result<std::vector<SlotIndex>>& chosen) {
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
    job->writers[who.shard].asked = std::max(job->writers[who.shard].asked, first + keys.size());
  }
  if (!chosen || chosen->size() != keys.size()) {
    throw Mismatch{"reserve does not answer for each key"};
  }
  const ShapeId shape = live_spaces_.at(space);
  std::vector<SlotIndex> slots;
  std::size_t steps = options_.slice_blocks;
  const auto decide = [&](const BlockKey& key, SlotIndex choice) {
    if (const SlotIndex present = find(space, key); present != kNoSlot) {
      if (is_readable(present) ||
          (slots_[present].state == State::kWritten && !is_doomed(*job_of(slots_[present].job)))) {
        ++counted_.skipped_present;
        return kNoSlot;
      }
      if (slots_[present].state == State::kSealed) {
        evict(present);  // Its extent is leaving.
      } else {
        slots_[present].has_key = false;  // Forgotten: the key may be reserved in another frame.
      }
    }
    if (!make_room(shape, steps)) {
      ++counted_.skipped_no_room;
      return kNoSlot;
    }
    Extent* const extent = choice < slots_.size() ? extent_of(choice) : nullptr;
    if (extent == nullptr || extent->shape != shape || extent->leaving ||
        choice - first_slot(*extent) >= extent->frames || slots_[choice].state != State::kFree) {
      throw Mismatch{fmt::format("a key got {}, which is no free frame of its shape",
                                 choice == kNoSlot ? "none" : fmt::format("frame {}", choice))};
    }
    make_job();
    slots_[choice] = {.state = State::kWritten,
                      .space = space,
                      .key = key,
                      .has_key = true,
                      .writer = who.writer(),
                      .job = job->serial};
    extent->touched = std::max(extent->touched, choice - first_slot(*extent) + 1);
    job->slots.push_back(choice);
    return choice;
  };
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (shared && first + i < job->answers.size()) {
      slots.push_back(job->answers[first + i]);
      continue;
    }
    slots.push_back(decide(keys[i], (*chosen)[i]));
    if (shared) job->answers.push_back(slots.back());
  }
  return slots;
}

Result<std::size_t> OracleStore::publish(HolderId holder, const JobId& job_id, std::size_t limit) {
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
  while (limit-- != 0 && !job->slots.empty()) {
    const SlotIndex slot = job->slots.back();
    job->slots.pop_back();
    slots_[slot].state = State::kSealed;
    slots_[slot].writer = who.writer();
    rest(slot);
    ++counted_.insertions;
  }
  const std::size_t left = job->slots.size();
  if (left == 0) jobs_.remove_if([&](const Job& each) { return &each == job; });
  return left;
}

void OracleStore::abandon(HolderId holder, const JobId& job_id) {
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
  for (std::size_t i = 0; i < options_.slice_blocks; ++i) {
    const auto first =
        std::find_if(jobs_.begin(), jobs_.end(), [](const Job& job) { return job.due; });
    if (first == jobs_.end() || first->deadline > clock_.now()) return;
    first->due = false;
    if (first->fate == Fate::kLive) {
      ++counted_.reservations_timed_out;
      forget(*first);
    } else {
      settle(*first);
    }
  }
}

std::optional<TimePoint> OracleStore::next_deadline() const {
  for (const Job& job : jobs_) {
    if (job.due) return job.deadline;
  }
  return std::nullopt;
}

// ---- what changes the state of one thing

void OracleStore::hold(SlotIndex slot) {
  at_rest_.remove(slot);
  ++slots_[slot].holds;
}

void OracleStore::rest(SlotIndex slot) {
  slots_[slot].last_use = ++uses_;
  at_rest_.push_back(slot);
  if (busy(*extent_of(slot)) == 0) ++quiet_;
}

void OracleStore::give_back(SlotIndex slot) {
  if (--slots_[slot].holds != 0) return;
  rest(slot);
  if (!live_spaces_.contains(slots_[slot].space)) {
    ++counted_.retired;
    free(slot);
  }
}

void OracleStore::free(SlotIndex slot) {
  const bool was_written = slots_[slot].state == State::kWritten;
  at_rest_.remove(slot);
  slots_[slot] = {};
  const Extent& extent = *extent_of(slot);
  if (was_written && busy(extent) == 0) ++quiet_;
  const SlotIndex begin = first_slot(extent);
  const bool is_empty = std::all_of(slots_.begin() + begin, slots_.begin() + begin + extent.frames,
                                    [](const Slot& each) { return each.state == State::kFree; });
  if (is_empty) extents_.remove_if([&](const Extent& each) { return &each == &extent; });
}

void OracleStore::evict(SlotIndex slot) {
  ++(live_spaces_.contains(slots_[slot].space) ? counted_.evictions : counted_.retired);
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
        job->queued = false;
        settle(*job);
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
      if (next_touched(work.next) == kNoSlot && work.again) work = {.kind = Kind::kDeadSweep};
      const SlotIndex slot = next_touched(work.next);
      if (slot == kNoSlot) return false;
      work.next = slot + 1;
      const Slot& content = slots_[slot];
      if (content.state == State::kSealed && content.holds == 0 &&
          !live_spaces_.contains(content.space)) {
        ++counted_.retired;
        free(slot);
      }
      return true;
    }
    case Kind::kCleanup: {
      const SlotIndex slot = next_touched(work.next);
      if (slot == kNoSlot) {
        cleanup_.done = true;
        return false;
      }
      work.next = slot + 1;
      const Slot& content = slots_[slot];
      if (content.state == State::kSealed && content.holds == 0) {
        ++(live_spaces_.contains(content.space) ? counted_.cleaned : counted_.retired);
        ++cleanup_.evicted_blocks;
        cleanup_.evicted_bytes += bytes_of(slot);
        free(slot);
      } else if (content.state != State::kFree) {
        ++cleanup_.still_referenced_blocks;
      }
      return true;
    }
    case Kind::kLeaving: {
      while (const Extent* const extent = extent_with(work.extent)) {
        if (work.next >= extent->touched) throw Mismatch{"an extent leaves with blocks in it"};
        const SlotIndex slot = first_slot(*extent) + work.next++;
        if (slots_[slot].state != State::kSealed) continue;
        evict(slot);
        return true;
      }
      --shapes_.at(work.for_shape).leaving_for_it;
      return false;
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
  for (SlotIndex slot = 0; slot < slots_.size(); ++slot) {
    stats.sealed += slots_[slot].state == State::kSealed ? 1 : 0;
    stats.sealed_bytes += slots_[slot].state == State::kSealed ? bytes_of(slot) : 0;
    stats.written_bytes += slots_[slot].state == State::kWritten ? bytes_of(slot) : 0;
    stats.held += slots_[slot].holds != 0 ? 1 : 0;
  }
  stats.free_units = units_;
  for (const Extent& extent : extents_) {
    for (const Run& run : extent.runs) stats.free_units -= run.count;
  }
  for (const Job& job : jobs_) {
    const auto slots = static_cast<std::uint32_t>(job.slots.size());
    std::uint64_t bytes = 0;
    for (const SlotIndex slot : job.slots) bytes += bytes_of(slot);
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
  stats.held_bytes = held_on_node();
  stats.claims = claims_.size();
  stats.pins = pins_.size();
  if (!pins_.empty()) stats.oldest_pin = pins_.front().opened;
  return stats;
}

}  // namespace pegaflow::sim
