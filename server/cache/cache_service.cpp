#include "server/cache/cache_service.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/page_layout.h"
#include "capnp/wire/room_time.h"
#include "server/cache/cache_service_impl.h"
#include "transport/checksum.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"cache"};

/// The interval between two log lines about wrong pages: failing memory causes many.
constexpr Duration kCorruptLineInterval = std::chrono::seconds(10);

/// The patience of a save whose bytes need no time: half of the time that clients wait.
constexpr Duration kReservePatience = std::chrono::milliseconds(10);

std::string not_served_state(const std::vector<CacheService::DeclinedInfo>& sides) {
  return "not served: " + sides.front().decline.detail;
}

std::uint64_t largest(const std::vector<std::uint64_t>& sizes) {
  return sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
}

std::string waiting_state(bool for_clients) {
  return for_clients ? "waiting for clients of the former server to end their copies"
                     : "waiting for the epochs of other nodes";
}

}  // namespace

Result<std::unique_ptr<CacheService>> CacheService::create(const Options& options,
                                                           const Clock& clock,
                                                           EndConnection end_connection) {
  PEGA_TRY_LET(auto store, engine::BlockStore::create(options.store, clock));
  PEGA_TRY_LET(auto demand, engine::Demand::create(options.demand_windows, clock));
  return std::unique_ptr<CacheService>(new CacheService(std::move(store), std::move(demand),
                                                        options, clock, std::move(end_connection)));
}

CacheService::CacheService(std::unique_ptr<engine::BlockStore> store,
                           std::unique_ptr<engine::Demand> demand, const Options& options,
                           const Clock& clock, EndConnection end_connection)
    : store_(std::move(store)),
      namespaces_(std::make_unique<engine::NamespaceTable>(*store_)),
      demand_(std::move(demand)),
      // Enough for the smallest pages; memory comes with the places that are used.
      checksums_(options.store.pool_bytes / kSlotAlignment, options.store.kept),
      waits_(*store_, clock, options.max_waits),
      chains_(PromptChains::Options(), clock),
      pool_bytes_(options.store.pool_bytes),
      parts_(options.store.numa_nodes),
      part_of_numa_node_(options.part_of_numa_node),
      max_detached_(options.max_detached),
      clock_(clock),
      end_connection_(std::move(end_connection)),
      epochs_([this]() { retire_outdated(); }, options.next_epoch),
      kept_(options.store.kept) {
  if (kept_ != nullptr) namespaces_->on_change([this]() { record_names(); });
}
CacheService::~CacheService() {
  // What this server leaves is what it has now.
  namespaces_->on_change({});
}

// ---- callers

Result<CacheService::Client*> CacheService::client(const Id128& connection) {
  const auto found = clients_.find(connection);
  if (found == clients_.end() || found->second->said_goodbye) {
    return fail(Errc::kGone, "this connection has ended");
  }
  return found->second.get();
}

Result<CacheService::Client*> CacheService::member(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, client(connection));
  if (caller->instance == nullptr) {
    return fail(Errc::kInvalidArgument, "this connection has neither registered nor attached");
  }
  return caller;
}

Result<CacheService::Client*> CacheService::worker(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  if (!caller->is_worker) {
    return fail(Errc::kInvalidArgument, "this connection has not registered as a worker");
  }
  return caller;
}

engine::SpaceId CacheService::space_of(const Instance& instance, std::size_t kind) const {
  const engine::NamespaceTable::Namespace* const found = namespaces_->find(instance.space_name);
  // The instance is a user of it, so it cannot have made room for another.
  PEGA_ASSERT(found != nullptr, "instance {} has no namespace", instance.id);
  return found->space(kind);
}

// ---- calls of a scheduler

Result<CacheService::Found> CacheService::lookup(const Id128& connection,
                                                 std::span<const BlockKey> keys, Counted when) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (!serves(instance)) {
    counted_.lookup_blocks_not_served += keys.size();
    return Found{};
  }
  const engine::SpaceId space = space_of(instance);
  const std::size_t blocks =
      when == Counted::kNow ? store_->lookup(space, keys) : store_->present(space, keys);
  demand_->requested(space, keys, blocks, instance.block_bytes.front());
  return Found{.blocks = blocks, .complete = true};
}

void CacheService::note_lookup(const Id128& connection, std::span<const BlockKey> keys,
                               std::size_t found, std::size_t elsewhere) {
  if (const auto caller = member(connection)) {
    store_->note_lookup(space_of(*(*caller)->instance), keys, found, elsewhere);
  }
}

Result<CacheService::Found> CacheService::claim(const Id128& connection, const Id128& token,
                                                std::span<const BlockKey> keys) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (!serves(instance)) return Found{};
  PEGA_TRY_LET(const std::size_t blocks,
               store_->claim(*caller->holder, space_of(instance), keys, token));
  return Found{.blocks = blocks, .complete = true};
}

Result<CacheService::Found> CacheService::claim_more(const Id128& connection, const Id128& token,
                                                     std::span<const BlockKey> keys) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  if (!serves(*caller->instance)) {
    store_->unclaim(*caller->holder, token);
    return Found{};
  }
  PEGA_TRY_LET(const std::size_t blocks, store_->claim_more(*caller->holder, token, keys));
  return Found{.blocks = blocks, .complete = true};
}

Result<void> CacheService::unclaim(const Id128& connection, const Id128& token) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  unclaim_kinds(*caller, token);
  return {};
}

Result<CacheService::Journal> CacheService::journal(const Id128& connection, std::uint64_t space,
                                                    std::uint64_t position) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  PEGA_TRY(store_->keep_journal());
  caller->reads_journal = true;
  // Before the first rank has registered the namespace is unknown.
  const engine::NamespaceTable::Namespace* const found =
      namespaces_->find(caller->instance->space_name);
  std::vector<engine::SpaceId> kinds;
  for (std::size_t kind = 0; found != nullptr && kind < found->kinds.size(); ++kind) {
    kinds.push_back(found->space(kind));
  }
  // All kinds have a new generation at once: that of kind 0 stands for them.
  const engine::SpaceId now = kinds.empty() ? engine::SpaceId{} : kinds.front();
  Journal journal{.space = static_cast<std::uint64_t>(now),
                  .part = store_->journal(kinds, position, kMaxJournalEntries)};
  // No entries of a space that did not exist were ever sent.
  if (position != engine::BlockStore::kJournalEnd && space != 0 && space != journal.space) {
    journal.part.has_lost = true;
  }
  return journal;
}

Result<bool> CacheService::report_chain(const Id128& connection, PromptChain chain) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  caller->reports_chains = true;
  const std::string& space = caller->instance->namespace_hash;
  return space.empty() ? chains_.are_wanted() : chains_.add(space, std::move(chain));
}

void CacheService::await_job(const Id128& connection, const JobId& job, Duration patience,
                             JobWaits::Answer answer, JobWaits::Until until) {
  if (auto caller = check_member(connection); !caller) return answer(std::move(caller));
  await_job_for(connection, job, patience, std::move(answer), until);
}

std::uint64_t CacheService::jobs_reached(const Id128& scheduler, JobWaits::Until until) {
  return waits_.reached(scheduler, until);
}

std::optional<CacheService::Reach> CacheService::direct_reach(const Id128& connection) {
  const auto caller = member(connection);
  if (!caller) return std::nullopt;
  const Instance& instance = *(*caller)->instance;
  if (!serves(instance) || !instance.rules.kinds.empty()) return std::nullopt;
  Reach reach{.generation = space_of(instance, 0), .workers = {}};
  for (const Rank& rank : instance.ranks) reach.workers.push_back(rank.worker);
  return reach;
}

std::optional<engine::SpaceId> CacheService::space_of_job(const JobId& job) const {
  return store_->space_of_job(job);
}

Result<void> CacheService::check_member(const Id128& connection) {
  return member(connection).map([](const Client*) {});
}

Result<CacheService::Reset> CacheService::reset_cache(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (instance.connected == 0) {
    return fail(Errc::kGone, "no rank of instance {} is connected", instance.id);
  }
  const engine::NamespaceTable::Namespace& space = *namespaces_->find(instance.space_name);
  if (!space.has_shapes()) {
    return fail(Errc::kGone, "not all ranks of instance {} have registered yet", instance.id);
  }
  const Bytes32 name = name_of(space, 0);
  const std::uint64_t learned = counted_.resets_learned;
  if (!epochs_.raise(name)) {
    return fail(Errc::kInternal, "there is no epoch after the last one of namespace {}",
                space.hash);
  }
  counted_.resets_learned = learned;  // This one was raised here.
  ++counted_.resets_here;
  return Reset{.generation = space.generation, .space = name};
}

// ---- calls of a worker

CacheService::Shards CacheService::shards_of(const Client& caller) {
  const Rank& rank = caller.instance->ranks[caller.rank];
  return {.first = rank.shard, .count = rank.cells};
}

std::vector<std::uint32_t> CacheService::pages_of(const std::vector<engine::FrameIndex>& frames,
                                                  const Client& caller) const {
  const std::uint32_t shard = caller.instance->ranks[caller.rank].shard;
  std::vector<std::uint32_t> pages;
  pages.reserve(frames.size());
  for (const engine::FrameIndex frame : frames) {
    pages.push_back(
        frame == engine::kNoFrame
            ? kNoPage
            : static_cast<std::uint32_t>(store_->page_offset(frame, shard) / kSlotAlignment));
  }
  return pages;
}

Result<std::size_t> CacheService::check_claim(const Client& caller, const Id128& token) const {
  const std::optional<engine::SpaceId> claimed = store_->space_of_claim(token);
  if (!claimed) return 0;
  const Instance& instance = *caller.instance;
  const Rank& rank = instance.ranks[caller.rank];
  const std::optional<std::size_t> kind = kind_of(instance, *claimed);
  if (!kind) {
    return fail(Errc::kInvalidArgument,
                "open: the claim is on blocks of another namespace or generation than instance {}",
                instance.id);
  }
  // A rank that came before the namespace had a shape may not fit it.
  if (auto fits = namespaces_->fits(instance.space_name, rank.shard, instance.shards,
                                    instance.rules, rank.page_bytes, rank.cells);
      !fits) {
    return fail(Errc::kInvalidArgument, "open: {}", fits.error().detail);
  }
  if (rank.page_bytes[*kind] == 0) {
    return fail(Errc::kInvalidArgument, "open: rank {} has no page of kind {}", caller.rank, *kind);
  }
  return *kind;
}

Result<CacheService::Opened> CacheService::open(const Id128& connection, const Id128& token,
                                                std::size_t first, std::size_t count,
                                                engine::PinId pin, std::size_t limit) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  PEGA_TRY_LET(const std::size_t kind, check_claim(*caller, token));
  PEGA_TRY_LET(const auto opened, store_->open(*caller->holder, token, first, count, pin, limit));
  if (opened.is_new) {  // A repeated call is no second load.
    const Instance& instance = *caller->instance;
    const std::uint64_t bytes =
        opened.frames.size() * instance.ranks[caller->rank].page_bytes[kind];
    counted(instance, kind).loaded_blocks += opened.frames.size();
    counted(instance, kind).loaded_bytes += bytes;
    counted_.load_bytes += bytes;
    counted_.load_blocks_own += opened.by_this_process;
    counted_.load_blocks_other += opened.frames.size() - opened.by_this_process;
  }
  Opened answer{.slots = pages_of(opened.frames, *caller), .checksums = {}};
  if (checksums_.is_empty()) return answer;
  const Rank& rank = caller->instance->ranks[caller->rank];
  std::vector<std::uint64_t> of_cells(rank.cells);
  answer.checksums.reserve(opened.frames.size());
  bool has_one = false;
  for (const engine::FrameIndex frame : opened.frames) {
    for (std::uint32_t cell = 0; cell < rank.cells; ++cell) {
      of_cells[cell] = checksums_[store_->page_number(frame, rank.shard + cell)];
    }
    answer.checksums.push_back(checksum_of_parts(of_cells));
    has_one = has_one || answer.checksums.back() != engine::ChecksumTable::kNone;
  }
  if (!has_one) answer.checksums.clear();
  return answer;
}

void CacheService::Opened::append(Opened next) {
  if (!checksums.empty() || !next.checksums.empty()) {
    checksums.resize(slots.size(), engine::ChecksumTable::kNone);
    next.checksums.resize(next.slots.size(), engine::ChecksumTable::kNone);
    checksums.insert(checksums.end(), next.checksums.begin(), next.checksums.end());
  }
  slots.insert(slots.end(), next.slots.begin(), next.slots.end());
}

Result<void> CacheService::release(const Id128& connection, engine::PinId pin) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  store_->release(*caller->holder, pin);
  return {};
}

Result<void> CacheService::corrupt(const Id128& connection, engine::PinId pin,
                                   std::span<const std::uint32_t> places) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  for (const std::uint32_t place : places) {
    PEGA_TRY(store_->invalidate(*caller->holder, pin, place));
    ++counted_.corrupt_pages;
  }
  const TimePoint now = clock_.now();
  if (!places.empty() &&
      (!last_corrupt_line_ || now - *last_corrupt_line_ >= kCorruptLineInterval)) {
    last_corrupt_line_ = now;
    kLog.error(
        "pages in the pool differ from what was saved, their blocks are invalidated instance={} "
        "pages={} since_start={}",
        caller->instance->id, places.size(), counted_.corrupt_pages);
  }
  return {};
}

Result<std::vector<std::uint32_t>> CacheService::reserve(
    const Id128& connection, const JobId& job, std::size_t first, std::span<const BlockKey> keys,
    bool has_more, engine::BlockStore::NoRoom no_room, std::size_t kind,
    std::span<const std::uint8_t> depths, engine::BlockStore::MayRefuse may_refuse) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  const Instance& instance = *caller->instance;
  PEGA_TRY(check_kind(instance, kind));
  const std::vector<std::uint64_t>& page_bytes = instance.ranks[caller->rank].page_bytes;
  if (page_bytes[kind] == 0) {
    return fail(Errc::kInvalidArgument, "reserve: rank {} has no page of kind {}", caller->rank,
                kind);
  }
  const auto& [shard, cells] = shards_of(*caller);
  if (!serves(instance)) {
    // The other ranks may have received frames while it was complete: this shard will not be
    // filled.
    store_->abandon(*caller->holder, job);
    waits_.settle();
    return std::vector<std::uint32_t>(keys.size(), kNoPage);
  }
  if (instance.saver(shard) != caller->rank) {
    return fail(Errc::kInvalidArgument, "shard {} is saved by rank {}", shard,
                instance.saver(shard));
  }
  const engine::SpaceId space = space_of(instance, kind);
  auto reserved =
      store_->reserve(*caller->holder, space, job, first, keys, no_room, depths, may_refuse);
  const bool is_unfinished = reserved.has_value() && (has_more || reserved->size() < keys.size());
  begun(instance, job, kind, shard, is_unfinished);
  if (!reserved) return tl::unexpected<Error>(std::move(reserved.error()));
  const std::vector<engine::FrameIndex>& frames = *reserved;
  const std::vector<engine::Shape::Shard>& pages = pages_of_kind(instance, kind);
  const auto has_page = [](const engine::Shape::Shard& each) { return each.page_bytes != 0; };
  if (std::find_if(pages.begin(), pages.end(), has_page) == pages.begin() + shard) {
    // Once for each block.
    demand_->saved(space, keys.first(frames.size()), instance.block_bytes[kind]);
  }
  if (!checksums_.is_empty()) {
    // The page that was there before may have left its checksum.
    for (const engine::FrameIndex frame : frames) {
      for (std::uint32_t each = shard; frame != engine::kNoFrame && each < shard + cells; ++each) {
        checksums_.clear(store_->page_number(frame, each));
      }
    }
  }
  return pages_of(frames, *caller);
}

const std::vector<engine::Shape::Shard>& CacheService::pages_of_kind(const Instance& instance,
                                                                     std::size_t kind) const {
  return namespaces_->find(instance.space_name)->kinds[kind].shape.shards;
}

void CacheService::begun(const Instance& instance, const JobId& job, std::size_t kind,
                         std::uint32_t shard, bool has_more) {
  // Ranks without a page of this kind never request the job.
  std::vector<bool> requesters(instance.writers(), false);
  const std::vector<engine::Shape::Shard>& pages = pages_of_kind(instance, kind);
  for (std::uint32_t each = 0; each < pages.size(); ++each) {
    if (pages[each].page_bytes != 0) requesters[instance.writer_of(each)] = true;
  }
  const bool is_of_all = std::find(requesters.begin(), requesters.end(), false) == requesters.end();
  if (is_of_all) requesters.clear();
  waits_.begun(job, instance.writer_of(shard), instance.writers(), has_more, requesters);
  waits_.settle();
}

Duration CacheService::reserve_patience(const Id128& connection, std::size_t blocks) const {
  const auto found = clients_.find(connection);
  if (found == clients_.end() || !found->second->is_worker) return kReservePatience;
  const Client& caller = *found->second;
  return kReservePatience +
         time_to_make_room(blocks * largest(caller.instance->ranks[caller.rank].page_bytes));
}

Result<std::size_t> CacheService::publish(const Id128& connection, const JobId& job,
                                          std::span<const std::uint64_t> checksums) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  if (!checksums.empty()) {
    const std::span<const engine::FrameIndex> frames = store_->frames_of(*caller->holder, job);
    const auto& [shard, cells] = shards_of(*caller);
    if (!frames.empty() && frames.size() * cells != checksums.size()) {
      return fail(Errc::kInvalidArgument, "{} checksums for {} pages", checksums.size(),
                  frames.size() * cells);
    }
    for (std::size_t i = 0; i < frames.size() * cells; ++i) {
      const auto each = shard + static_cast<std::uint32_t>(i % cells);
      checksums_.set(store_->page_number(frames[i / cells], each), checksums[i]);
    }
  }
  const Instance& instance = *caller->instance;
  const std::optional<engine::SpaceId> space = store_->space_of_job(job);
  const std::uint64_t sealed_before = store_->stats().insertions;
  auto left = store_->publish(*caller->holder, job, kPublishSlice);
  const std::uint64_t sealed = store_->stats().insertions - sealed_before;
  // An instance that was never complete has no sizes, and nothing that it could seal.
  const auto kind = space && sealed != 0 ? kind_of(instance, *space) : std::nullopt;
  if (kind) {
    const std::uint64_t bytes = sealed * instance.block_bytes[*kind];
    counted(instance, *kind).saved_blocks += sealed;
    counted(instance, *kind).saved_bytes += bytes;
    counted_.save_bytes += bytes;
  }
  waits_.settle();
  return left;
}

Result<void> CacheService::abandon(const Id128& connection, const JobId& job) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  store_->abandon(*caller->holder, job);
  waits_.settle();
  return {};
}

// ---- time and background work

bool CacheService::work() {
  bool has_more = store_->work();
  if (!has_more && namespaces_->has_emptied_shape()) {
    namespaces_->forget_shapes();
    has_more = store_->has_work();
  }
  waits_.settle();
  return has_more;
}

bool CacheService::has_work() const {
  return store_->has_work() || namespaces_->has_emptied_shape();
}

std::optional<TimePoint> CacheService::next_deadline() const {
  const std::optional<TimePoint> wait = waits_.next_deadline();
  const std::optional<TimePoint> job = store_->next_deadline();
  return wait && job ? std::min(*wait, *job) : wait ? wait : job;
}

void CacheService::expire() {
  store_->expire();
  waits_.settle();
  waits_.expire();
}

// ---- reports

void CacheService::add_schedulers(std::vector<InstanceInfo>& list) const {
  for (const auto& [connection, client] : clients_) {
    const bool reports = client->engine || client->reads_journal || client->reports_chains;
    if (!client->is_scheduler || !reports) continue;
    const auto info = std::find_if(list.begin(), list.end(), [&](const InstanceInfo& each) {
      return each.id == client->instance->id;
    });
    if (client->engine) info->scheduler = client->engine;
    info->has_kv_events = info->has_kv_events || client->reads_journal;
    info->reports_chains = info->reports_chains || client->reports_chains;
  }
}

std::vector<CacheService::InstanceInfo> CacheService::instances() const {
  std::vector<InstanceInfo> list;
  auto not_served = declined();
  list.reserve(instances_.size() + not_served.size());
  for (const auto& [id, instance] : instances_) {
    InstanceInfo& info = list.emplace_back();
    info.id = id;
    if (const auto found = not_served.find(id); found != not_served.end()) {
      info.not_served = std::move(found->second);
      not_served.erase(found);
    }
    info.state = !info.not_served.empty()    ? not_served_state(info.not_served)
                 : instance.connected == 0   ? "disconnected"
                 : !instance.refused.empty() ? "refused: " + instance.refused
                 : serves(instance)          ? "connected"
                 : instance.is_complete()    ? waiting_state(is_closed_)
                                             : "waiting for ranks";
    info.namespace_hash = instance.namespace_hash;
    info.kinds = instance.rules;
    info.shards = instance.shards;
    info.rank_count = static_cast<std::uint32_t>(instance.ranks.size());
    for (std::uint32_t number = 0; number < instance.ranks.size(); ++number) {
      const Rank& rank = instance.ranks[number];
      if (rank.process.is_none()) continue;
      info.ranks.push_back({.rank = number,
                            .shard = rank.shard,
                            .cells = instance.cells,
                            .is_connected = !rank.worker.is_none(),
                            .build = rank.build,
                            .process = rank.process,
                            .connection = rank.worker,
                            .page_bytes = rank.page_bytes,
                            .block_count = rank.block_count,
                            .numa_node = rank.numa_node});
      if (const auto client = clients_.find(rank.worker); client != clients_.end()) {
        info.ranks.back().engine = client->second->engine;
      }
    }
    info.schedulers = instance.schedulers;
    if (const auto* const space = namespaces_->find(instance.space_name)) {
      info.factors = space->factors;
      info.generation = space->generation;
    }
  }
  add_schedulers(list);
  for (auto& [id, sides] : not_served) {
    InstanceInfo& info = list.emplace_back();
    info.id = id;
    info.state = not_served_state(sides);
    info.not_served = std::move(sides);
  }
  std::sort(list.begin(), list.end(),
            [](const InstanceInfo& a, const InstanceInfo& b) { return a.id < b.id; });
  return list;
}

CacheService::Stats CacheService::stats() const {
  Stats stats = counted_;
  stats.store = store_->stats();
  stats.shapes = store_->shapes();
  stats.memory_bytes = store_->memory_bytes() + demand_->memory_bytes() + checksums_.memory_bytes();
  stats.clients = clients_.size();
  stats.detached = detached_.size();
  stats.instances = instances_.size();
  for (const auto& [id, instance] : instances_) {
    if (instance.connected != 0 && !instance.is_complete()) ++stats.instances_waiting;
    if (!instance.refused.empty()) ++stats.instances_refused;
  }
  for (const auto& [id, sides] : declined()) {
    ++stats.instances_declined[static_cast<std::size_t>(sides.front().decline.reason)];
  }
  stats.namespaces = namespaces_->all().size();
  stats.space_names = spaces_.size();
  stats.demand = demand_->windows();
  stats.next_victim_idle_s = store_->next_victim_idle_s();
  stats.waits = waits_.stats();
  stats.epochs = epochs_.size();
  return stats;
}

}  // namespace pegaflow::server
