#include "tests/sim/world.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <fmt/format.h>

namespace pegaflow::sim {

namespace {

constexpr std::size_t kHistory = 200;
constexpr std::uint64_t kCell = 4096;
/// The instance whose ranks hold a shard each.
constexpr std::uint32_t kShared = 2;

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
  options_.pool_bytes = (1 + pick(chance(0.3) ? 12 : 300)) * kCell;
  // The model knows this order; the others have models of their own in tests/unit/engine.
  options_.eviction = EvictionKind::kLru;
  options_.nodes = static_cast<std::uint32_t>(1 + pick(2));
  options_.slice_blocks = static_cast<std::uint32_t>(1 + pick(chance(0.5) ? 8 : 64));
  options_.instance_share = std::array{0.2, 0.5, 1.0}[pick(3)];
  options_.node_share = std::array{0.4, 0.8, 1.0}[pick(3)];
  options_.reservation_timeout = std::chrono::seconds(30);
  options_.claim_grace = std::chrono::milliseconds(pick(2) * 1000);
  if (chance(0.3)) {
    options_.max_claims = static_cast<std::uint32_t>(1 + pick(6));
    options_.max_pins = static_cast<std::uint32_t>(1 + pick(4));
    options_.max_reservations = static_cast<std::uint32_t>(1 + pick(4));
  }
  options_.journal_entries = chance(0.3) ? 8 : 1U << 12;
  options_.journal_first = chance(0.5) ? 0 : ~std::uint64_t{0} / 2;
  auto store = BlockStore::create(options_, clock_);
  if (!store) throw Mismatch{"the store cannot be made: " + to_string(store.error())};
  store_ = std::move(*store);
  if (!store_->keep_journal()) throw Mismatch{"no memory for the journal"};
  journal_read_ = store_->journal(SpaceId{}, BlockStore::kJournalEnd, 1).next;
  oracle_ = std::make_unique<OracleStore>(options_, clock_);
  memory_ = std::make_unique<PageMemory>(static_cast<std::uint32_t>(options_.pool_bytes / kCell));
  chains_ = make_chains(random_);
  make_shapes();
  // Each world has its own habits, so that rare neighbourhoods of events are found too.
  weights_ = {20, 20, 2, 10, 8, 14, 5, 20, 3, 10, 6, 1.5, 0.5, 1.5, 0.5, 6, 3, 14, 0.3, 3};
  for (double& weight : weights_) weight *= std::array{0.3, 1.0, 1.0, 3.0}[pick(4)];
  note("world of {} cells on {} nodes, slices of {}, shares {} and {}, {} claims, {} pins, {} jobs",
       options_.pool_bytes / kCell, options_.nodes, options_.slice_blocks, options_.instance_share,
       options_.node_share, options_.max_claims, options_.max_pins, options_.max_reservations);
  for (int i = 0; i < 3; ++i) connect();
}

void World::make_shapes() {
  shards_ = static_cast<std::uint32_t>(2 + pick(2));
  const auto space_of = [&](std::uint32_t shards) {
    Shape shape;
    for (std::uint32_t shard = 0; shard < shards; ++shard) {
      const std::uint64_t cells = chance(0.6) ? 1 : 1 + pick(chance(0.2) ? 40 : 5);
      shape.shards.push_back({.page_bytes = cells * kCell - pick(2) * 100,
                              .node = static_cast<std::uint32_t>(pick(options_.nodes))});
    }
    const auto added = store_->add_shape(shape);
    if (!added) return;  // It does not fit this pool.
    while (store_->work()) {
    }
    oracle_->add_shape(*added, shape);
    shapes_[*added] = shape;
    spaces_.push_back({store_->make_space(*added), *added, shards});
    shape_of_space_[spaces_.back().id] = *added;
    oracle_->add_space(spaces_.back().id, *added);
  };
  const std::size_t before = spaces_.size();
  space_of(shards_);
  if (spaces_.size() == before) shards_ = 1;
  space_of(1);
  space_of(1);
  while (spaces_.empty() || spaces_.back().shards != 1) space_of(1);
}

std::uint32_t World::shards_of(std::uint32_t instance) const {
  return instance == kShared ? shards_ : 1;
}

ShapeId World::shape_of(SpaceId space) const { return shape_of_space_.at(space); }

Place World::place_of(SlotIndex frame, std::uint32_t shard, ShapeId shape) const {
  const std::uint64_t offset = store_->page_offset(frame, shard);
  const Shape::Shard& page = shapes_.at(shape).shards[shard];
  const auto ranges = node_ranges(options_.pool_bytes, options_.nodes);
  const NodeRange& range = ranges[page.node < ranges.size() ? page.node : 0];
  if (offset % kCell != 0 || offset < range.begin || offset + page.page_bytes > range.end) {
    throw Mismatch{fmt::format("a page of node {} lies at {}", page.node, offset)};
  }
  return {static_cast<std::uint32_t>(offset / kCell),
          static_cast<std::uint32_t>((page.page_bytes + kCell - 1) / kCell)};
}

void World::step() {
  using Event = void (World::*)();
  static constexpr std::array<Event, 20> kEvents = {
      &World::reserve,     &World::publish, &World::abandon,       &World::copy_some,
      &World::lookup,      &World::claim,   &World::unclaim,       &World::open,
      &World::open_again,  &World::release, &World::connect,       &World::lose_connection,
      &World::end_process, &World::quiesce, &World::reset_space,   &World::pass_time,
      &World::expire,      &World::work,    &World::start_cleanup, &World::call_wrongly};
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
  const Process& process = processes_[connections_[*who].process];
  if (shards_of(process.instance) > 1) return reserve_shared(*who);
  const SpaceId space = pick_space(process.instance);
  // A slice more of a job, or a new one.
  std::optional<std::size_t> save;
  for (std::size_t i = 0; i < saves_.size() && chance(0.5); ++i) {
    if (saves_[i].holder == holder && !saves_[i].copies_ended) save = i;
  }
  const JobId job = save ? saves_[*save].job : JobId{process.incarnation, next_job_++};
  const SpaceId where = save && chance(0.97) ? saves_[*save].space : space;
  const std::vector<BlockKey> keys = pick_keys();
  note("reserve holder={} space={} job={} keys={}", number(holder), number(where), job.number,
       keys.size());
  const auto chosen = store_->reserve(holder, where, job, 0, keys);
  const auto expected = oracle_->reserve(holder, where, job, 0, keys, chosen);
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
    add_page(saves_[*save], slot, keys[i], 0);
  }
}

void World::add_page(Save& save, SlotIndex frame, const BlockKey& key, std::uint32_t shard) {
  const Stamp stamp{next_stamp_++};
  const Place place = place_of(frame, shard, shape_of(save.space));
  note("copy {} of job {} into frame {}, cells {} to {}", number(stamp), save.job.number, frame,
       place.first, place.first + place.count);
  memory_->begin_write(place, stamp);
  save.pages.push_back({frame, place, key, stamp});
}

void World::reserve_shared(std::size_t connection) {
  // What its scheduler handed out, to all ranks: a job that others know, or a new one; whole or in
  // slices; now and then beyond what was decided.
  const HolderId holder = connections_[connection].holder;
  const Process& process = processes_[connections_[connection].process];
  std::optional<std::size_t> which;
  for (std::size_t i = 0; i < shared_jobs_.size(); ++i) {
    if (chance(0.4)) which = i;
  }
  if (!which || chance(0.2)) {
    shared_jobs_.push_back({.job = {Id128{5, 5}, next_job_++},
                            .instance = process.instance,
                            .space = pick_space(process.instance),
                            .keys = pick_keys()});
    // Nobody asks for old ones any more, but who has them may still publish.
    if (shared_jobs_.size() > 12) {
      const auto idle =
          std::find_if(shared_jobs_.begin(), shared_jobs_.end() - 1, [&](const SharedJob& each) {
            return std::none_of(saves_.begin(), saves_.end(),
                                [&](const Save& save) { return save.job == each.job; });
          });
      if (idle != shared_jobs_.end() - 1) shared_jobs_.erase(idle);
    }
    which = shared_jobs_.size() - 1;
  }
  SharedJob& job = shared_jobs_[*which];
  const auto known = std::find_if(saves_.begin(), saves_.end(), [&](const Save& save) {
    return save.holder == holder && save.job == job.job;
  });
  const std::size_t asked = known == saves_.end() ? 0 : known->asked;
  // A rank asks no more for a job once it has ended it.
  if (known != saves_.end() && known->copies_ended) return;
  const bool beyond = chance(0.02);
  const std::size_t first = beyond ? asked + 1 + pick(3) : asked;
  const std::size_t left = job.keys.size() - std::min(first, job.keys.size());
  const std::span<const BlockKey> keys = std::span(job.keys).subspan(
      std::min(first, job.keys.size()), chance(0.6) ? left : pick(left + 1));
  note("reserve holder={} shard={} space={} job={} first={} keys={}", number(holder), process.shard,
       number(job.space), job.job.number, first, keys.size());
  const auto chosen = store_->reserve(holder, job.space, job.job, first, keys);
  const auto expected = oracle_->reserve(holder, job.space, job.job, first, keys, chosen);
  if (!same_outcome(chosen, expected) || (chosen && *chosen != *expected)) {
    throw Mismatch{
        fmt::format("reserve answers {} and should {}", outcome(chosen), outcome(expected))};
  }
  coverage_.hit("shared reserve " + outcome(chosen));
  if (!chosen || beyond) return;
  Save* save = known == saves_.end() ? nullptr : &*known;
  if (save == nullptr) {
    saves_.push_back({.job = job.job, .holder = holder, .space = job.space});
    save = &saves_.back();
  }
  save->asked += keys.size();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const SlotIndex frame = (*chosen)[i];
    if (frame == kNoSlot) continue;
    const bool is_new = !job.stamps.contains(frame);
    add_page(*save, frame, keys[i], process.shard);
    job.stamps[frame][process.shard] = save->pages.back().stamp;
    if (is_new) job.frames.push_back(frame);
  }
}

void World::copy_some() {
  for (const Save& save : saves_) {
    if (save.copies_ended || !chance(0.5)) continue;
    for (const Page& page : save.pages) memory_->write(page.place, page.stamp);
    note("job {} writes {} pages", save.job.number, save.pages.size());
    coverage_.hit("pages written", save.pages.size());
  }
  for (const Load& load : loads_) {
    if (load.copies_ended || !chance(0.5)) continue;
    for (const Page& page : load.pages) memory_->verify(page.place, page.stamp);
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
    for (const Page& page : save.pages) memory_->end_write(page.place, page.stamp, true);
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
  const auto shared = std::find_if(shared_jobs_.begin(), shared_jobs_.end(),
                                   [&](const SharedJob& each) { return each.job == save.job; });
  const bool is_shared = shards_of_save(save) > 1;
  coverage_.hit((is_shared ? "shared publish " : "publish ") + outcome(left));
  if (!left) {
    saves_.erase(saves_.begin() + static_cast<std::ptrdiff_t>(which));
    return;
  }
  if (!is_shared) {
    while (save.pages.size() > *left) {
      published_[{save.space, save.pages.back().key}] = {{0, save.pages.back().stamp}};
      save.pages.pop_back();
    }
    if (*left == 0) saves_.erase(saves_.begin() + static_cast<std::ptrdiff_t>(which));
    return;
  }
  save.published = true;
  // Sealed or not is what lookups say; here only who wrote what, should it be sealed.
  for (const Page& page : save.pages) {
    if (shared == shared_jobs_.end()) throw Mismatch{"the world has lost a job"};
    const auto& stamps = shared->stamps.at(page.slot);
    if (stamps.size() == shards_) published_[{save.space, page.key}] = stamps;
  }
  const bool all_published = shards_ == static_cast<std::size_t>(std::count_if(
                                            saves_.begin(), saves_.end(), [&](const Save& each) {
                                              return each.job == save.job && each.published;
                                            }));
  if (all_published && *left == 0) {
    const JobId done = save.job;
    // A late rank may have begun the job anew after it was forgotten: it still copies.
    std::erase_if(saves_, [&](const Save& each) { return each.job == done && each.copies_ended; });
    if (std::none_of(saves_.begin(), saves_.end(),
                     [&](const Save& each) { return each.job == done; })) {
      std::erase_if(shared_jobs_, [&](const SharedJob& each) { return each.job == done; });
    }
    coverage_.hit("shared job sealed");
  }
}

std::uint32_t World::shards_of_save(const Save& save) const {
  return save.job.scheduler == Id128{5, 5} ? shards_ : 1;
}

void World::abandon() {
  if (saves_.empty()) return;
  const std::size_t which = pick(saves_.size());
  const Save save = saves_[which];
  if (!may_speak(save.holder)) return;
  if (!save.copies_ended) {
    for (const Page& page : save.pages) memory_->end_write(page.place, page.stamp, false);
  }
  note("abandon holder={} job={}", number(save.holder), save.job.number);
  store_->abandon(save.holder, save.job);
  oracle_->abandon(save.holder, save.job);
  saves_.erase(saves_.begin() + static_cast<std::ptrdiff_t>(which));
}

// ---- reading

void World::lookup() {
  const SpaceId space = chance(0.95) || former_spaces_.empty()
                            ? spaces_[pick(spaces_.size())].id
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
  const SpaceId space = pick_space(processes_[connections_[*who].process].instance);
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
    made.blocks.push_back(published_.at({space, keys[i]}));
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
  const std::size_t first = pick(claim.blocks.size() + (chance(0.1) ? 2 : 0));
  const std::size_t count =
      pick(claim.blocks.size() - std::min(first, claim.blocks.size()) + 1) + (chance(0.05) ? 1 : 0);
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
  const ShapeId shape = shape_of(claim.space);
  const std::uint32_t shard = processes_[connections_[*who].process].shard;
  for (std::size_t i = 0; i < count; ++i) {
    // Somebody of another instance may open the token; it reads the first shard.
    const std::uint32_t own = shard < shapes_.at(shape).shards.size() ? shard : 0;
    const SlotIndex frame = pages->slots[i];
    const Page page{frame, place_of(frame, own, shape), {}, claim.blocks[first + i].at(own)};
    memory_->verify(page.place, page.stamp);
    memory_->begin_read(page.place);
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
      memory_->verify(page.place, page.stamp);
      memory_->end_read(page.place);
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
    const auto instance = static_cast<std::uint32_t>(chance(0.5) ? kShared : pick(3));
    processes_.push_back(
        {Id128{1, process + 1}, instance, static_cast<std::uint32_t>(pick(shards_of(instance)))});
  }
  const HolderId holder =
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

void World::end_copies_of(HolderId holder, bool whole) {
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
      expect("claim of a former holder", store_->claim(former, spaces_[0].id, keys, Id128{9, 9}),
             oracle_->claim(former, spaces_[0].id, keys, Id128{9, 9}));
      break;
    case 1:
      expect("claim without token", store_->claim(talking, spaces_[0].id, keys, Id128{}),
             oracle_->claim(talking, spaces_[0].id, keys, Id128{}));
      break;
    case 2: {
      if (claims_.empty()) break;
      const Id128 token = claims_[pick(claims_.size())].token;
      const auto answered = store_->claim(talking, spaces_[0].id, {}, token);
      expect("claim under a used token", answered,
             oracle_->claim(talking, spaces_[0].id, {}, token));
      break;
    }
    case 3:
      expect("open of an old token", store_->open(talking, old_token, 0, 1, PinId{next_pin_}),
             oracle_->open(talking, old_token, 0, 1, PinId{next_pin_}));
      break;
    case 4: {
      const JobId job{Id128{3, 3}, 1};
      const auto answered = store_->reserve(former, spaces_[0].id, job, 0, keys);
      expect("reserve of a former holder", answered,
             oracle_->reserve(former, spaces_[0].id, job, 0, keys, answered));
      break;
    }
    case 5: {
      if (former_spaces_.empty()) break;
      const SpaceId space = former_spaces_[pick(former_spaces_.size())];
      const JobId job{Id128{3, 3}, 2};
      const auto answered = store_->reserve(talking, space, job, 0, keys);
      expect("reserve in a former space", answered,
             oracle_->reserve(talking, space, job, 0, keys, answered));
      break;
    }
    case 6: {
      // Somebody else's job: neither its slots nor its blocks may change hands.
      if (saves_.empty()) break;
      const Save& save = saves_[pick(saves_.size())];
      const JobId job = save.job;
      const HolderId other = chance(0.5) ? talking : former;
      if (other == save.holder || shards_of_save(save) > 1) break;
      const auto reserved = store_->reserve(other, save.space, job, 0, keys);
      expect("reserve for a foreign job", reserved,
             oracle_->reserve(other, save.space, job, 0, keys, reserved));
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
      stats.used_bytes != stats.sealed_bytes) {
    throw Mismatch{"something is left when everybody is gone"};
  }
  start_cleanup();
  while (store_->has_work()) work();
  compare();
  if (store_->stats().free_units != store_->stats().units || !store_->cleanup().done) {
    throw Mismatch{"a unit is not free after cleanup"};
  }
  if (!memory_->is_quiet()) throw Mismatch{"somebody touches a page that is free"};
  coverage_.hit("evictions", stats.evictions);
  coverage_.hit("extents taken", stats.extents_taken);
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

SpaceId World::pick_space(std::uint32_t instance) {
  std::vector<SpaceId> possible;
  for (const OneSpace& space : spaces_) {
    if (space.shards == shards_of(instance)) possible.push_back(space.id);
  }
  return possible[pick(possible.size())];
}

}  // namespace pegaflow::sim
