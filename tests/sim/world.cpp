#include "tests/sim/world.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <fmt/format.h>

namespace pegaflow::sim {

namespace {

constexpr std::size_t kHistory = 50;
constexpr std::size_t kSpaces = 2;

template <typename Enum>
std::uint64_t number(Enum value) {
  return static_cast<std::uint64_t>(value);
}

/// Keys that meet each other on purpose: chains share their beginnings, and many keys share the
/// bytes that the store's hash looks at.
std::vector<std::vector<BlockKey>> make_chains(std::mt19937_64& random) {
  std::vector<std::vector<BlockKey>> chains;
  for (std::uint64_t chain = 0; chain < 10; ++chain) {
    std::vector<BlockKey> keys(4 + random() % 24);
    for (std::uint64_t i = 0; i < keys.size(); ++i) {
      const std::uint64_t branch = i < 3 ? chain % 2 : chain;
      const std::array<std::uint64_t, 4> words = {branch % 3, 0, i, branch};
      std::memcpy(keys[i].bytes.data(), words.data(), sizeof words);
    }
    chains.push_back(std::move(keys));
  }
  return chains;
}

template <typename T>
std::string outcome(const Result<T>& result) {
  return result ? "ok" : std::string(to_string(result.error().code));
}

template <typename T>
bool same_outcome(const Result<T>& left, const Result<T>& right) {
  return left.has_value() == right.has_value() &&
         (left.has_value() || left.error().code == right.error().code);
}

}  // namespace

template <typename... Args>
void World::note(fmt::format_string<Args...> format, Args&&... args) {
  history_.push_back(fmt::format("{}: ", steps_) +
                     fmt::format(format, std::forward<Args>(args)...));
  if (history_.size() > kHistory) history_.pop_front();
  ++notes_;
}

World::World(std::uint64_t seed, Coverage& coverage) : random_(seed), coverage_(coverage) {
  options_.slot_count = static_cast<std::uint32_t>(1 + pick(chance(0.3) ? 12 : 160));
  options_.slice_blocks = static_cast<std::uint32_t>(1 + pick(chance(0.5) ? 8 : 64));
  options_.instance_share = std::array{0.2, 0.5, 1.0}[pick(3)];
  options_.node_share = std::array{0.4, 0.8, 1.0}[pick(3)];
  options_.reservation_timeout = std::chrono::seconds(30);
  options_.claim_grace = std::chrono::milliseconds(pick(2) * 1000);
  if (chance(0.3)) {
    options_.max_claims = static_cast<std::uint32_t>(1 + pick(6));
    options_.max_pins = static_cast<std::uint32_t>(1 + pick(10));
    options_.max_reservations = static_cast<std::uint32_t>(1 + pick(4));
  }
  auto store = BlockStore::create(options_, clock_);
  if (!store) throw Mismatch{"the store cannot be made: " + to_string(store.error())};
  store_ = std::move(*store);
  oracle_ = std::make_unique<OracleStore>(options_, clock_);
  memory_ = std::make_unique<PageMemory>(options_.slot_count);
  chains_ = make_chains(random_);
  while (spaces_.size() < kSpaces) {
    spaces_.push_back(store_->make_space());
    oracle_->add_space(spaces_.back());
  }
  // Each world has its own habits, so that rare neighbourhoods of events are found too.
  weights_ = {20, 14, 3, 10, 8, 14, 5, 20, 3, 10, 6, 1.5, 0.5, 1.5, 0.5, 6, 3, 14, 0.3, 0.1, 3};
  for (double& weight : weights_) weight *= std::array{0.3, 1.0, 1.0, 3.0}[pick(4)];
  note("world of {} slots, slices of {}, shares {} and {}, {} claims, {} pins, {} jobs",
       options_.slot_count, options_.slice_blocks, options_.instance_share, options_.node_share,
       options_.max_claims, options_.max_pins, options_.max_reservations);
  for (int i = 0; i < 3; ++i) connect();
}

void World::step() {
  using Event = void (World::*)();
  static constexpr std::array<Event, 21> kEvents = {
      &World::reserve,     &World::publish, &World::abandon,       &World::copy_some,
      &World::lookup,      &World::claim,   &World::unclaim,       &World::open,
      &World::open_again,  &World::release, &World::connect,       &World::lose_connection,
      &World::end_process, &World::quiesce, &World::reset_space,   &World::pass_time,
      &World::expire,      &World::work,    &World::start_cleanup, &World::recut,
      &World::call_wrongly};
  ++steps_;
  // Until one applies: a step that did nothing would only look like work.
  std::discrete_distribution<std::size_t> which(weights_.begin(), weights_.end());
  const std::uint64_t noted = notes_;
  while (notes_ == noted) (this->*kEvents[which(random_)])();
  compare();
}

// ---- writing

void World::reserve() {
  const auto who = pick_talking();
  if (!who) return;
  const HolderId holder = connections_[*who].holder;
  const SpaceId space = pick_space();
  // A slice more of a job, or a new one.
  std::optional<std::size_t> save;
  for (std::size_t i = 0; i < saves_.size() && chance(0.5); ++i) {
    if (saves_[i].holder == holder && !saves_[i].copies_ended) save = i;
  }
  const JobId job = save ? saves_[*save].job
                         : JobId{processes_[connections_[*who].process].incarnation, next_job_++};
  const SpaceId where = save && chance(0.97) ? saves_[*save].space : space;
  const std::vector<BlockKey> keys = pick_keys();
  note("reserve holder={} space={} job={} keys={}", number(holder), number(where), job.number,
       keys.size());
  const auto chosen = store_->reserve(holder, where, job, keys);
  const auto expected = oracle_->reserve(holder, where, job, keys, chosen);
  if (!same_outcome(chosen, expected) || (chosen && *chosen != *expected)) {
    throw Mismatch{
        fmt::format("reserve answers {} and should {}", outcome(chosen), outcome(expected))};
  }
  coverage_.hit("reserve " + outcome(chosen));
  if (!chosen) return;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const SlotIndex slot = (*chosen)[i];
    if (slot == kNoSlot) continue;
    if (!save) {
      saves_.push_back({.job = job, .holder = holder, .space = where});
      save = saves_.size() - 1;
    }
    const Stamp stamp{next_stamp_++};
    memory_->begin_write(slot, stamp);
    saves_[*save].pages.push_back({slot, keys[i], stamp});
  }
}

void World::copy_some() {
  for (const Save& save : saves_) {
    if (save.copies_ended || !chance(0.5)) continue;
    for (const Page& page : save.pages) memory_->write(page.slot, page.stamp);
    note("job {} writes {} pages", save.job.number, save.pages.size());
    coverage_.hit("pages written", save.pages.size());
  }
  for (const Load& load : loads_) {
    if (load.copies_ended || !chance(0.5)) continue;
    for (const Page& page : load.pages) memory_->verify(page.slot, page.stamp);
    note("pin {} reads {} pages", number(load.pin), load.pages.size());
    coverage_.hit("pages read", load.pages.size());
  }
}

void World::publish() {
  if (saves_.empty()) return;
  const std::size_t which = pick(saves_.size());
  if (!may_speak(saves_[which].holder)) return;
  // Also for a connection that was lost meanwhile: its last calls may still be under way.
  const std::size_t limit = chance(0.5) ? ~std::size_t{0} : pick(6);
  do_publish(which, saves_[which].holder, limit);
}

void World::do_publish(std::size_t which, HolderId caller, std::size_t limit) {
  Save& save = saves_[which];
  if (!save.copies_ended) {
    for (const Page& page : save.pages) memory_->end_write(page.slot, page.stamp, true);
    save.copies_ended = true;
  }
  note("publish holder={} job={} limit={} of {}", number(caller), save.job.number,
       static_cast<std::int64_t>(limit), save.pages.size());
  const auto left = store_->publish(caller, save.job, limit);
  const auto expected = oracle_->publish(caller, save.job, limit);
  if (!same_outcome(left, expected) || (left && *left != *expected)) {
    throw Mismatch{
        fmt::format("publish answers {} and should {}", outcome(left), outcome(expected))};
  }
  coverage_.hit("publish " + outcome(left));
  if (left) {
    while (save.pages.size() > *left) {
      published_[{save.space, save.pages.back().key}] = save.pages.back().stamp;
      save.pages.pop_back();
    }
  }
  if (!left || *left == 0) saves_.erase(saves_.begin() + static_cast<std::ptrdiff_t>(which));
}

void World::abandon() {
  if (saves_.empty()) return;
  const std::size_t which = pick(saves_.size());
  const Save save = saves_[which];
  if (!may_speak(save.holder)) return;
  if (!save.copies_ended) {
    for (const Page& page : save.pages) memory_->end_write(page.slot, page.stamp, false);
  }
  note("abandon holder={} job={}", number(save.holder), save.job.number);
  store_->abandon(save.holder, save.job);
  oracle_->abandon(save.holder, save.job);
  saves_.erase(saves_.begin() + static_cast<std::ptrdiff_t>(which));
}

// ---- reading

void World::lookup() {
  const SpaceId space = chance(0.95) || former_spaces_.empty()
                            ? pick_space()
                            : former_spaces_[pick(former_spaces_.size())];
  const std::vector<BlockKey> keys = pick_keys();
  const std::size_t found = store_->lookup(space, keys);
  note("lookup space={} keys={} found={}", number(space), keys.size(), found);
  if (found != oracle_->lookup(space, keys)) throw Mismatch{"lookup finds another prefix"};
  coverage_.hit("lookup hit", found);
}

void World::claim() {
  const auto who = pick_talking();
  if (!who) return;
  const HolderId holder = connections_[*who].holder;
  const SpaceId space = pick_space();
  const std::vector<BlockKey> keys = pick_keys();
  const Id128 token{0, next_token_++};
  note("claim holder={} space={} token={} keys={}", number(holder), number(space), token.low,
       keys.size());
  const auto count = store_->claim(holder, space, keys, token);
  const auto expected = oracle_->claim(holder, space, keys, token);
  if (!same_outcome(count, expected) || (count && *count != *expected)) {
    throw Mismatch{
        fmt::format("claim answers {} and should {}", outcome(count), outcome(expected))};
  }
  coverage_.hit("claim " + outcome(count));
  if (!count || *count == 0) return;
  Claim made{.holder = holder, .token = token, .space = space};
  for (std::size_t i = 0; i < *count; ++i) {
    made.pages.push_back({kNoSlot, keys[i], published_.at({space, keys[i]})});
  }
  claims_.push_back(std::move(made));
}

void World::unclaim() {
  if (claims_.empty()) return;
  const std::size_t which = pick(claims_.size());
  const Claim claim = claims_[which];
  if (!may_speak(claim.holder)) return;
  note("unclaim holder={} token={}", number(claim.holder), claim.token.low);
  store_->unclaim(claim.holder, claim.token);
  oracle_->unclaim(claim.holder, claim.token);
  former_tokens_.push_back(claim.token);
  claims_.erase(claims_.begin() + static_cast<std::ptrdiff_t>(which));
}

void World::open() {
  const auto who = pick_talking();
  if (!who || claims_.empty()) return;
  const Claim& claim = claims_[pick(claims_.size())];
  const HolderId holder = connections_[*who].holder;
  const std::size_t first = pick(claim.pages.size() + (chance(0.1) ? 2 : 0));
  const std::size_t count =
      pick(claim.pages.size() - std::min(first, claim.pages.size()) + 1) + (chance(0.05) ? 1 : 0);
  const PinId pin{next_pin_++};
  note("open holder={} token={} first={} count={} pin={}", number(holder), claim.token.low, first,
       count, number(pin));
  const auto pages = store_->open(holder, claim.token, first, count, pin);
  const auto expected = oracle_->open(holder, claim.token, first, count, pin);
  if (!same_outcome(pages, expected) ||
      (pages &&
       (pages->slots != expected->slots || pages->by_this_process != expected->by_this_process))) {
    throw Mismatch{fmt::format("open answers {} and should {}", outcome(pages), outcome(expected))};
  }
  coverage_.hit("open " + outcome(pages));
  if (!pages) return;
  Load load{.holder = holder, .pin = pin, .token = claim.token, .first = first};
  for (std::size_t i = 0; i < count; ++i) {
    Page page = claim.pages[first + i];
    page.slot = pages->slots[i];
    memory_->verify(page.slot, page.stamp);
    memory_->begin_read(page.slot);
    load.pages.push_back(page);
  }
  loads_.push_back(std::move(load));
}

void World::open_again() {
  // The same name twice: the same call again, or one for something else.
  if (loads_.empty()) return;
  const Load& load = loads_[pick(loads_.size())];
  if (!may_speak(load.holder)) return;
  const bool is_same = chance(0.5);
  const std::size_t first = is_same ? load.first : pick(4);
  const std::size_t count = is_same ? load.pages.size() : 1 + pick(4);
  const Id128 token = is_same || claims_.empty() ? load.token : claims_[pick(claims_.size())].token;
  note("open again holder={} token={} first={} count={} pin={}", number(load.holder), token.low,
       first, count, number(load.pin));
  const auto pages = store_->open(load.holder, token, first, count, load.pin);
  const auto expected = oracle_->open(load.holder, token, first, count, load.pin);
  if (!same_outcome(pages, expected) || (pages && pages->slots != expected->slots)) {
    throw Mismatch{
        fmt::format("open again answers {} and should {}", outcome(pages), outcome(expected))};
  }
  coverage_.hit("open again " + outcome(pages));
}

void World::release() {
  if (loads_.empty()) return;
  const std::size_t which = pick(loads_.size());
  if (may_speak(loads_[which].holder)) release_load(which);
}

void World::release_load(std::size_t which) {
  const Load load = loads_[which];
  if (!load.copies_ended) {
    for (const Page& page : load.pages) {
      memory_->verify(page.slot, page.stamp);
      memory_->end_read(page.slot);
    }
  }
  const int times = chance(0.1) ? 2 : 1;
  for (int i = 0; i < times; ++i) {
    note("release holder={} pin={}", number(load.holder), number(load.pin));
    store_->release(load.holder, load.pin);
    oracle_->release(load.holder, load.pin);
  }
  loads_.erase(loads_.begin() + static_cast<std::ptrdiff_t>(which));
}

// ---- processes and connections

void World::connect() {
  if (connections_.size() >= 12) return;
  std::size_t process = processes_.size();
  if (!processes_.empty() && chance(0.4)) process = pick(processes_.size());
  if (process == processes_.size() || processes_[process].killed) {
    process = processes_.size();
    processes_.push_back({Id128{1, process + 1}, static_cast<std::uint32_t>(pick(3))});
  }
  const HolderId holder =
      store_->add_holder(processes_[process].instance, processes_[process].incarnation);
  oracle_->add_holder(holder, processes_[process].instance, processes_[process].incarnation);
  note("connect holder={} process={} instance={}", number(holder), process,
       processes_[process].instance);
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

void World::end_copies_of(HolderId holder, bool whole) {
  for (Save& save : saves_) {
    if (save.holder != holder || save.copies_ended) continue;
    for (const Page& page : save.pages) memory_->end_write(page.slot, page.stamp, whole);
    save.copies_ended = true;
  }
  for (Load& load : loads_) {
    if (load.holder != holder || load.copies_ended) continue;
    for (const Page& page : load.pages) memory_->end_read(page.slot);
    load.copies_ended = true;
  }
}

void World::end_process() {
  // Killed: every copy of the process stops where it is. Its connections are found out about one
  // after the other, and each may be lost before it is gone.
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
  // The same incarnation says that all copies of a former connection ended.
  if (connections_.empty()) return;
  const std::size_t which = pick(connections_.size());
  if (!may_speak(connections_[which].holder)) return;
  if (!connections_[which].lost && chance(0.7)) return;
  end_copies_of(connections_[which].holder, true);
  coverage_.hit("quiesced");
  holder_gone(which);
}

void World::holder_gone(std::size_t which) {
  const HolderId holder = connections_[which].holder;
  connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(which));
  note("gone holder={}", number(holder));
  store_->holder_gone(holder);
  oracle_->holder_gone(holder);
  forget_records_of(holder);
  former_holders_.push_back(holder);
}

void World::forget_records_of(HolderId holder) {
  std::erase_if(saves_, [&](const Save& save) { return save.holder == holder; });
  std::erase_if(loads_, [&](const Load& load) { return load.holder == holder; });
  for (const Claim& claim : claims_) {
    if (claim.holder == holder) former_tokens_.push_back(claim.token);
  }
  std::erase_if(claims_, [&](const Claim& claim) { return claim.holder == holder; });
}

// ---- time, resets, work

void World::reset_space() {
  const std::size_t which = pick(spaces_.size());
  note("retire space={}", number(spaces_[which]));
  store_->retire_space(spaces_[which]);
  oracle_->retire_space(spaces_[which]);
  former_spaces_.push_back(spaces_[which]);
  spaces_[which] = store_->make_space();
  oracle_->add_space(spaces_[which]);
  coverage_.hit("reset");
}

void World::pass_time() {
  const auto by = std::chrono::milliseconds(chance(0.2) ? 20000 : 100 + pick(900));
  note("time passes: {} ms", by.count());
  clock_.advance(by);
}

void World::expire() {
  note("expire");
  store_->expire();
  oracle_->expire();
}

void World::work() {
  note("work");
  if (store_->work() != oracle_->work()) throw Mismatch{"work ends at another slice"};
}

void World::start_cleanup() {
  note("cleanup");
  store_->start_cleanup();
  oracle_->start_cleanup();
  coverage_.hit("cleanup");
}

void World::recut() {
  const auto slots = static_cast<std::uint32_t>(pick(120));
  // Mostly it is refused: give it the chance that a server sees when an instance has left.
  if (chance(0.7)) {
    for (std::size_t i = connections_.size(); i-- > 0;) {
      end_copies_of(connections_[i].holder, true);
      holder_gone(i);
    }
    while (store_->has_work()) work();
    if (oracle_->has_work()) throw Mismatch{"the store drops work"};
  }
  note("recut to {}", slots);
  const auto done = store_->recut(slots);
  const auto expected = oracle_->recut(slots);
  if (!same_outcome(done, expected)) {
    throw Mismatch{fmt::format("recut answers {} and should {}", outcome(done), outcome(expected))};
  }
  coverage_.hit("recut " + outcome(done));
  if (!done) return;
  if (!memory_->is_quiet()) throw Mismatch{"the pool was cut while somebody touches it"};
  memory_ = std::make_unique<PageMemory>(slots);
  published_.clear();
}

void World::call_wrongly() {
  const std::vector<BlockKey> keys = pick_keys();
  const auto who = pick_talking();
  const HolderId talking = who ? connections_[*who].holder : HolderId{0};
  const HolderId former =
      former_holders_.empty() ? HolderId{1U << 30} : former_holders_[pick(former_holders_.size())];
  const Id128 old_token =
      former_tokens_.empty() ? Id128{7, 7} : former_tokens_[pick(former_tokens_.size())];
  const auto expect = [&](const char* what, auto answered, auto expected) {
    note("wrong: {}", what);
    if (!same_outcome(answered, expected)) {
      throw Mismatch{
          fmt::format("{} answers {} and should {}", what, outcome(answered), outcome(expected))};
    }
    coverage_.hit("wrong " + outcome(answered));
  };
  switch (pick(8)) {
    case 0:
      expect("claim of a former holder", store_->claim(former, pick_space(), keys, Id128{9, 9}),
             oracle_->claim(former, pick_space(), keys, Id128{9, 9}));
      break;
    case 1:
      expect("claim without token", store_->claim(talking, spaces_[0], keys, Id128{}),
             oracle_->claim(talking, spaces_[0], keys, Id128{}));
      break;
    case 2: {
      if (claims_.empty()) break;
      const Id128 token = claims_[pick(claims_.size())].token;
      const auto answered = store_->claim(talking, spaces_[0], {}, token);
      expect("claim under a used token", answered, oracle_->claim(talking, spaces_[0], {}, token));
      break;
    }
    case 3:
      expect("open of an old token", store_->open(talking, old_token, 0, 1, PinId{next_pin_}),
             oracle_->open(talking, old_token, 0, 1, PinId{next_pin_}));
      break;
    case 4: {
      const JobId job{Id128{3, 3}, 1};
      const auto answered = store_->reserve(former, spaces_[0], job, keys);
      expect("reserve of a former holder", answered,
             oracle_->reserve(former, spaces_[0], job, keys, answered));
      break;
    }
    case 5: {
      if (former_spaces_.empty()) break;
      const SpaceId space = former_spaces_[pick(former_spaces_.size())];
      const JobId job{Id128{3, 3}, 2};
      const auto answered = store_->reserve(talking, space, job, keys);
      expect("reserve in a former space", answered,
             oracle_->reserve(talking, space, job, keys, answered));
      break;
    }
    case 6: {
      // Somebody else's job: neither its slots nor its blocks may change hands.
      if (saves_.empty()) break;
      const Save& save = saves_[pick(saves_.size())];
      const JobId job = save.job;
      const HolderId other = chance(0.5) ? talking : former;
      if (other == save.holder) break;
      const auto reserved = store_->reserve(other, save.space, job, keys);
      expect("reserve for a foreign job", reserved,
             oracle_->reserve(other, save.space, job, keys, reserved));
      const auto answered = store_->publish(other, job, 1);
      expect("publish of a foreign job", answered, oracle_->publish(other, job, 1));
      store_->abandon(other, job);
      oracle_->abandon(other, job);
      break;
    }
    default:
      note("wrong: release, unclaim, lost and gone of nobody");
      store_->release(former, PinId{1});
      oracle_->release(former, PinId{1});
      store_->unclaim(talking, old_token);
      oracle_->unclaim(talking, old_token);
      store_->holder_lost(former);
      oracle_->holder_lost(former);
      store_->holder_gone(former);
      oracle_->holder_gone(former);
      if (!former_spaces_.empty()) {
        store_->retire_space(former_spaces_[0]);
        oracle_->retire_space(former_spaces_[0]);
      }
  }
}

void World::shut_down() {
  note("shut down");
  // In any order: killed, lost first, or quiesced.
  while (!connections_.empty()) {
    const std::size_t which = pick(connections_.size());
    const HolderId holder = connections_[which].holder;
    end_copies_of(holder, chance(0.5));
    if (chance(0.5)) {
      store_->holder_lost(holder);
      oracle_->holder_lost(holder);
    }
    holder_gone(which);
    compare();
  }
  while (store_->has_work()) {
    work();
    compare();
  }
  const BlockStore::Stats stats = store_->stats();
  if (!store_->is_at_rest() || stats.pins != 0 || stats.claims != 0 || stats.reservations != 0 ||
      stats.free + stats.sealed != store_->slot_count()) {
    throw Mismatch{"something is left when everybody is gone"};
  }
  start_cleanup();
  while (store_->has_work()) work();
  compare();
  if (store_->stats().free != store_->slot_count() || !store_->cleanup().done) {
    throw Mismatch{"a slot is not free after cleanup"};
  }
  coverage_.hit("evictions", stats.evictions);
  coverage_.hit("retired", stats.retired);
  coverage_.hit("cleaned", store_->stats().cleaned);
  coverage_.hit("skipped, present", stats.skipped_present);
  coverage_.hit("skipped, no room", stats.skipped_no_room);
  coverage_.hit("claims revoked", stats.claims_revoked);
  coverage_.hit("claims shortened", stats.claims_shortened);
  coverage_.hit("reservations timed out", stats.reservations_timed_out);
  coverage_.hit("late publishes", stats.late_publishes);
}

// ---- chance

std::size_t World::pick(std::size_t count) {
  return count == 0 ? 0 : static_cast<std::size_t>(random_() % count);
}

bool World::chance(double probability) {
  return static_cast<double>(random_() >> 11) * 0x1.0p-53 < probability;
}

std::optional<std::size_t> World::pick_talking() {
  for (int attempt = 0; attempt < 8 && !connections_.empty(); ++attempt) {
    const std::size_t which = pick(connections_.size());
    if (!connections_[which].lost && !processes_[connections_[which].process].killed) return which;
  }
  return std::nullopt;
}

bool World::may_speak(HolderId holder) const {
  return std::any_of(connections_.begin(), connections_.end(), [&](const Connection& each) {
    return each.holder == holder && !processes_[each.process].killed;
  });
}

bool World::touches_memory(HolderId holder) const {
  const auto copies = [&](const auto& each) { return each.holder == holder && !each.copies_ended; };
  return std::any_of(saves_.begin(), saves_.end(), copies) ||
         std::any_of(loads_.begin(), loads_.end(), copies);
}

std::vector<BlockKey> World::pick_keys() {
  if (chance(0.01)) return {};
  const std::vector<BlockKey>& chain = chains_[pick(chains_.size())];
  const std::size_t begin = chance(0.7) ? 0 : pick(chain.size());
  const std::size_t count = 1 + pick(chain.size() - begin);
  const auto first = chain.begin() + static_cast<std::ptrdiff_t>(begin);
  std::vector<BlockKey> keys(first, first + static_cast<std::ptrdiff_t>(count));
  if (chance(0.02)) keys.push_back(keys.front());  // No engine does; it must not hurt.
  return keys;
}

SpaceId World::pick_space() { return spaces_[pick(spaces_.size())]; }

}  // namespace pegaflow::sim
