#include "server/cache_service.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/page_layout.h"
#include "base/units.h"
#include "capnp/room_time.h"
#include "server/cache_service_rows.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"cache"};

/// Between two lines about wrong pages: memory that goes bad gives many.
constexpr Duration kCorruptLineInterval = std::chrono::seconds(10);

/// Of a save whose bytes need no time: half of what clients wait for the answer.
constexpr Duration kReservePatience = std::chrono::milliseconds(10);

}  // namespace

Result<std::unique_ptr<CacheService>> CacheService::create(const Options& options,
                                                           const Clock& clock,
                                                           EndConnection end_connection) {
  PEGA_TRY_LET(auto store, BlockStore::create(options.store, clock));
  PEGA_TRY_LET(auto demand, Demand::create(options.demand_windows, clock));
  return std::unique_ptr<CacheService>(new CacheService(std::move(store), std::move(demand),
                                                        options, clock, std::move(end_connection)));
}

CacheService::CacheService(std::unique_ptr<BlockStore> store, std::unique_ptr<Demand> demand,
                           const Options& options, const Clock& clock, EndConnection end_connection)
    : store_(std::move(store)),
      namespaces_(std::make_unique<NamespaceTable>(*store_)),
      demand_(std::move(demand)),
      // Enough for the smallest pages; memory comes with the places that are used.
      checksums_(options.store.pool_bytes / kSlotAlignment),
      waits_(*store_, clock, options.max_waits),
      pool_bytes_(options.store.pool_bytes),
      parts_(options.store.nodes),
      part_of_node_(options.part_of_node),
      max_parted_(options.max_parted),
      clock_(clock),
      end_connection_(std::move(end_connection)) {}
CacheService::~CacheService() = default;

// ---- who is asking

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

SpaceId CacheService::space_of(const Instance& instance) const {
  const NamespaceTable::Namespace* const found = namespaces_->find(instance.space_name);
  // The instance is a user of it, so it cannot have made room for another.
  PEGA_ASSERT(found != nullptr, "instance {} has no namespace", instance.id);
  return found->space;
}

// ---- connections

Result<void> CacheService::connected(const Id128& connection, Hello hello) {
  if (hello.process.is_none()) {
    return fail(Errc::kInvalidArgument, "a client without an incarnation");
  }
  if (const Id128& previous = hello.previous_connection; !previous.is_none()) {
    if (const auto there = clients_.find(previous); there != clients_.end()) {
      if (there->second->process != hello.process) {
        return fail(Errc::kInvalidArgument, "the previous connection was another process's");
      }
      // We have not seen its end yet; the client has.
      end_connection_(previous);
    }
    if (const auto parted = parted_.find(previous); parted != parted_.end()) {
      if (parted->second->process != hello.process) {
        return fail(Errc::kInvalidArgument, "the previous connection was another process's");
      }
      if (hello.quiesced) end_parted(parted);
    }
  }
  auto client = std::make_unique<Client>();
  client->connection = connection;
  client->process = hello.process;
  client->build = std::move(hello.build);
  client->watch = std::move(hello.watch);
  clients_.emplace(connection, std::move(client));
  return {};
}

void CacheService::disconnected(const Id128& connection) {
  const auto found = clients_.find(connection);
  if (found == clients_.end()) return;
  Client& client = *found->second;
  waits_.forget(connection);
  if (client.instance != nullptr && client.holder) {
    Instance& instance = *client.instance;
    if (client.is_worker) {
      kLog.info("worker's connection ended instance={} rank={} process={}", instance.id,
                client.rank, to_string(client.process));
    }
    store_->holder_lost(*client.holder);
    if (store_->may_touch(*client.holder)) {
      auto parted = std::make_unique<Parted>();
      parted->process = client.process;
      parted->holder = *client.holder;
      parted->instance = &instance;
      parted->watch = client.watch;
      ++instance.references;
      parted_.emplace(connection, std::move(parted));
    } else {
      store_->holder_gone(*client.holder);
    }
    client.holder.reset();
    leave_instance(client);
  }
  clients_.erase(found);
  waits_.settle();
}

void CacheService::process_gone(const Id128& connection) {
  // Its end may be seen here before its socket's.
  if (clients_.contains(connection)) end_connection_(connection);
  if (const auto parted = parted_.find(connection); parted != parted_.end()) {
    kLog.info("process ended, its slots come back instance={} process={}",
              parted->second->instance->id, to_string(parted->second->process));
    end_parted(parted);
  }
}

void CacheService::end_parted(std::unordered_map<Id128, std::unique_ptr<Parted>>::iterator parted) {
  store_->holder_gone(parted->second->holder);
  Instance& instance = *parted->second->instance;
  parted_.erase(parted);
  drop_reference(instance);
}

Result<void> CacheService::goodbye(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, client(connection));
  if (caller->holder) store_->holder_gone(*caller->holder);
  caller->holder.reset();
  caller->said_goodbye = true;
  waits_.forget(connection);
  leave_instance(*caller);
  waits_.settle();
  return {};
}

void CacheService::leave_instance(Client& client) {
  Instance* const instance = std::exchange(client.instance, nullptr);
  if (instance == nullptr) return;
  if (std::exchange(client.is_worker, false)) {
    instance->ranks[client.rank].worker = {};
    --instance->connected;
    instance->refused.clear();
    namespaces_->leave(instance->space_name);
    // Without this rank none of the jobs that are under way can be sealed.
    for (const auto& [scheduler, served] : schedulers_) {
      if (served == instance) waits_.lost(scheduler);
    }
  }
  if (std::exchange(client.is_scheduler, false)) {
    --instance->schedulers;
    leave_schedulers(client);
  }
  drop_reference(*instance);
}

void CacheService::leave_schedulers(Client& client) {
  const Id128 scheduler = std::exchange(client.scheduler, Id128{});
  if (scheduler.is_none()) return;
  waits_.detached(scheduler);
  if (!waits_.is_attached(scheduler)) schedulers_.erase(scheduler);
}

void CacheService::drop_reference(Instance& instance) {
  if (--instance.references == 0) instances_.erase(std::string(instance.id));
}

Result<void> CacheService::join(Client& client, const std::string& id) {
  if (client.instance != nullptr) {
    if (client.instance->id == id) return {};
    return fail(Errc::kInvalidArgument, "this connection belongs to instance {}",
                client.instance->id);
  }
  const auto [found, is_new] = instances_.try_emplace(id);
  Instance& instance = found->second;
  if (is_new) {
    instance.id = id;
    instance.index = next_instance_++;
  }
  ++instance.references;
  client.instance = &instance;
  client.holder = store_->add_holder(instance.index, client.process);
  return {};
}

Result<void> CacheService::attach(const Id128& connection, const std::string& instance,
                                  const Id128& scheduler) {
  PEGA_TRY_LET(Client* const caller, client(connection));
  PEGA_TRY(join(*caller, instance));
  if (!std::exchange(caller->is_scheduler, true)) ++caller->instance->schedulers;
  if (caller->scheduler.is_none() && !scheduler.is_none()) {
    const auto [known, is_new] = schedulers_.try_emplace(scheduler, caller->instance);
    if (!is_new && known->second != caller->instance) {
      return fail(Errc::kInvalidArgument, "scheduler {} belongs to instance {}",
                  to_string(scheduler), known->second->id);
    }
    caller->scheduler = scheduler;
    waits_.attached(scheduler);
  }
  return {};
}

Result<void> CacheService::check_rank(const Client& caller, const Registration& registration) {
  if (registration.page_bytes == 0) return fail(Errc::kInvalidArgument, "a page of 0 bytes");
  if (registration.page_bytes > kMaxPageBytes ||
      slot_bytes_for(registration.page_bytes) > pool_bytes_) {
    return fail(Errc::kRefused, "a page of {} does not fit: {} is the limit of a page, {} the pool",
                format_bytes(registration.page_bytes), format_bytes(kMaxPageBytes),
                format_bytes(pool_bytes_));
  }
  if (registration.shards > kMaxShards || registration.ranks > kMaxShards) {
    return fail(Errc::kRefused, "{} ranks: {} are the limit", registration.ranks, kMaxShards);
  }
  const auto known = instances_.find(registration.instance);
  if (known == instances_.end()) return {};
  const Instance& instance = known->second;
  if (instance.connected != 0 &&
      (instance.ranks.size() != registration.ranks || instance.shards != registration.shards)) {
    return fail(Errc::kInvalidArgument,
                "rank {} says {} ranks and {} shards, others of instance {} {} and {}",
                registration.rank, registration.ranks, registration.shards, instance.id,
                instance.ranks.size(), instance.shards);
  }
  if (registration.rank >= instance.ranks.size()) return {};
  const Rank& rank = instance.ranks[registration.rank];
  if (rank.worker.is_none()) return {};
  if (rank.process != caller.process) {
    return fail(Errc::kRefused, "rank {} of instance {} is served by another process ({})",
                registration.rank, instance.id, to_string(rank.process));
  }
  // The same process over a new connection: the old one is of no more use to it.
  end_connection_(Id128(rank.worker));
  return {};
}

Result<void> CacheService::enter_namespace(Client& caller, const Registration& registration,
                                           NamespaceId& entered) {
  std::vector<NamespaceFactor> factors;
  factors.reserve(registration.factors.size());
  for (const auto& [name, value] : registration.factors) factors.push_back({name, value});
  PEGA_TRY_LET(const NamespaceTable::Namespace* const space,
               namespaces_->enter(std::move(factors)));
  entered = space->id;
  const auto check = [&]() -> Result<void> {
    PEGA_TRY(namespaces_->fits(entered, registration.shard, registration.shards,
                               registration.page_bytes));
    PEGA_TRY(join(caller, registration.instance));
    if (caller.instance->connected != 0 && caller.instance->space_name != entered) {
      return fail(Errc::kInvalidArgument,
                  "rank {} says another namespace than others of instance {}", registration.rank,
                  caller.instance->id);
    }
    return {};
  };
  auto checked = check();
  if (!checked) namespaces_->leave(entered);
  return checked;
}

Result<CacheService::Registered> CacheService::register_rank(const Id128& connection,
                                                             const Registration& registration) {
  PEGA_TRY_LET(Client* const caller, client(connection));
  if (caller->is_worker) {
    const Instance& own = *caller->instance;
    if (own.id != registration.instance || caller->rank != registration.rank ||
        own.ranks[caller->rank].page_bytes != registration.page_bytes) {
      return fail(Errc::kInvalidArgument, "this connection has registered for instance {}", own.id);
    }
    return Registered{own.namespace_hash};
  }
  if (!caller->watch) {
    return fail(
        Errc::kRefused,
        "without a pidfd that can be polled nobody could tell when this process ends, so it "
        "gets no pool (Linux 5.3 or newer is needed)");
  }
  // Before the namespace hears of it: a size that can never be would stay its size.
  PEGA_TRY(check_rank(*caller, registration));
  if (parted_.size() >= max_parted_) {
    return fail(Errc::kBusy, "{} ended connections may still be copying; no room for more",
                parted_.size());
  }
  NamespaceId space_name{};
  if (auto entered = enter_namespace(*caller, registration, space_name); !entered) {
    if (caller->instance != nullptr && !caller->is_scheduler) {
      store_->holder_gone(*caller->holder);
      caller->holder.reset();
      leave_instance(*caller);
    }
    if (entered.error().code == Errc::kRefused) {
      ++counted_.refused_page_size;
      kLog.error("an engine serves without the cache instance={} reason=\"{}\"",
                 registration.instance, entered.error().detail);
    }
    return tl::unexpected<Error>(std::move(entered.error()));
  }
  Instance& instance = *caller->instance;
  if (instance.connected == 0) {
    instance.ranks.assign(registration.ranks, Rank{});
    instance.shards = registration.shards;
    instance.space_name = space_name;
    instance.namespace_hash = namespaces_->find(space_name)->hash;
  }
  caller->is_worker = true;
  caller->rank = registration.rank;
  Rank& rank = instance.ranks[registration.rank];
  rank = {.worker = connection,
          .process = caller->process,
          .build = caller->build,
          .shard = registration.shard,
          .page_bytes = registration.page_bytes,
          .block_count = registration.block_count,
          .node = registration.node};
  store_->set_shard(*caller->holder, registration.shard, registration.shards);
  ++instance.connected;
  kLog.info("registered instance={} rank={} of={} process={} namespace={} page={}", instance.id,
            registration.rank, instance.ranks.size(), to_string(rank.process),
            instance.namespace_hash, format_bytes(rank.page_bytes));
  if (instance.connected == instance.ranks.size()) complete(instance);
  if (!instance.refused.empty() && instance.ranks.size() == 1) {
    // Nobody else waits for it: it is told at once, and leaves no trace.
    Error error{Errc::kRefused, instance.refused};
    store_->holder_gone(*caller->holder);
    caller->holder.reset();
    const bool is_scheduler = std::exchange(caller->is_scheduler, false);
    const Id128 scheduler = caller->scheduler;
    if (is_scheduler) {
      --instance.schedulers;
      leave_schedulers(*caller);
    }
    const std::string id = instance.id;
    leave_instance(*caller);
    if (is_scheduler) (void)attach(connection, id, scheduler);
    return tl::unexpected<Error>(std::move(error));
  }
  return Registered{instance.namespace_hash};
}

void CacheService::complete(Instance& instance) {
  Shape shape;
  instance.block_bytes = 0;
  for (std::uint32_t shard = 0; shard < instance.shards; ++shard) {
    shape.shards.push_back({.page_bytes = instance.ranks[instance.saver(shard)].page_bytes,
                            .node = node_of(instance, shard)});
    instance.block_bytes += shape.shards.back().page_bytes;
  }
  const auto settle = [&]() -> Result<void> {
    for (std::uint32_t shard = 0; shard < instance.shards; ++shard) {
      if (instance.ranks[instance.saver(shard)].shard != shard) {
        return fail(Errc::kRefused, "no rank of instance {} holds shard {}", instance.id, shard);
      }
    }
    for (const Rank& rank : instance.ranks) {
      if (rank.page_bytes != shape.shards[rank.shard].page_bytes) {
        return fail(Errc::kRefused, "pages of {} and {} bytes for shard {} of instance {}",
                    rank.page_bytes, shape.shards[rank.shard].page_bytes, rank.shard, instance.id);
      }
    }
    return namespaces_->settle(instance.space_name, shape);
  };
  if (const auto settled = settle(); !settled) {
    instance.refused = settled.error().detail;
    ++counted_.refused_page_size;
    kLog.error("an engine serves without the cache instance={} reason=\"{}\"", instance.id,
               instance.refused);
    return;
  }
  name_space(instance);
  kLog.info("complete instance={} ranks={} shards={}", instance.id, instance.ranks.size(),
            instance.shards);
}

std::uint32_t CacheService::node_of(const Instance& instance, std::uint32_t shard) const {
  if (parts_ < 2) return 0;
  const auto found = part_of_node_.find(instance.ranks[instance.saver(shard)].node);
  // Who names none is dealt one in turn, from another on for each engine.
  return found != part_of_node_.end() ? found->second : (instance.index + shard) % parts_;
}

// ---- calls of a scheduler

Result<CacheService::Found> CacheService::lookup(const Id128& connection,
                                                 std::span<const BlockKey> keys) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (!instance.is_complete()) {
    counted_.lookup_blocks_not_served += keys.size();
    return Found{};
  }
  const SpaceId space = space_of(instance);
  const std::size_t blocks = store_->lookup(space, keys);
  demand_->asked(space, keys, blocks, instance.block_bytes);
  return Found{.blocks = blocks, .complete = true};
}

Result<CacheService::Found> CacheService::claim(const Id128& connection, const Id128& token,
                                                std::span<const BlockKey> keys) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (!instance.is_complete()) return Found{};
  PEGA_TRY_LET(const std::size_t blocks,
               store_->claim(*caller->holder, space_of(instance), keys, token));
  return Found{.blocks = blocks, .complete = true};
}

Result<CacheService::Found> CacheService::claim_more(const Id128& connection, const Id128& token,
                                                     std::span<const BlockKey> keys) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  if (!caller->instance->is_complete()) {
    store_->unclaim(*caller->holder, token);
    return Found{};
  }
  PEGA_TRY_LET(const std::size_t blocks, store_->claim_more(*caller->holder, token, keys));
  return Found{.blocks = blocks, .complete = true};
}

Result<void> CacheService::unclaim(const Id128& connection, const Id128& token) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  store_->unclaim(*caller->holder, token);
  return {};
}

Result<CacheService::Journal> CacheService::journal(const Id128& connection, std::uint64_t space,
                                                    std::uint64_t position) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  PEGA_TRY(store_->keep_journal());
  // Before the first rank has registered nobody knows what the namespace will be.
  const NamespaceTable::Namespace* const found = namespaces_->find(caller->instance->space_name);
  const SpaceId now = found == nullptr ? SpaceId{} : found->space;
  Journal journal{.space = static_cast<std::uint64_t>(now),
                  .part = store_->journal(now, position, kMaxJournalEntries)};
  // Nobody has been told anything of a space that did not exist.
  if (position != BlockStore::kJournalEnd && space != 0 && space != journal.space) {
    journal.part.has_lost = true;
  }
  return journal;
}

void CacheService::await_job(const Id128& connection, const JobId& job, Duration patience,
                             JobWaits::Answer answer) {
  if (auto caller = check_member(connection); !caller) return answer(std::move(caller));
  await_job_for(connection, job, patience, std::move(answer));
}

Result<void> CacheService::check_member(const Id128& connection) {
  return member(connection).map([](const Client*) {});
}

Result<std::uint64_t> CacheService::reset_cache(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (instance.connected == 0) {
    return fail(Errc::kGone, "no rank of instance {} is connected", instance.id);
  }
  namespaces_->reset(instance.space_name);
  return namespaces_->find(instance.space_name)->generation;
}

// ---- calls of a worker

std::vector<std::uint32_t> CacheService::pages_of(const std::vector<SlotIndex>& frames,
                                                  const Client& caller) const {
  const std::uint32_t shard = caller.instance->ranks[caller.rank].shard;
  std::vector<std::uint32_t> pages;
  pages.reserve(frames.size());
  for (const SlotIndex frame : frames) {
    pages.push_back(frame == kNoSlot ? kNoPage
                                     : static_cast<std::uint32_t>(
                                           store_->page_offset(frame, shard) / kSlotAlignment));
  }
  return pages;
}

Result<CacheService::Opened> CacheService::open(const Id128& connection, const Id128& token,
                                                std::size_t first, std::size_t count, PinId pin,
                                                std::size_t limit) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  PEGA_TRY_LET(const auto opened, store_->open(*caller->holder, token, first, count, pin, limit));
  if (opened.is_new) {  // A repeated call is no second load.
    counted_.load_bytes += opened.slots.size() * caller->instance->ranks[caller->rank].page_bytes;
    counted_.load_blocks_own += opened.by_this_process;
    counted_.load_blocks_other += opened.slots.size() - opened.by_this_process;
  }
  Opened answer{.slots = pages_of(opened.slots, *caller), .checksums = {}};
  if (checksums_.is_empty()) return answer;
  const std::uint32_t shard = caller->instance->ranks[caller->rank].shard;
  answer.checksums.reserve(opened.slots.size());
  bool has_one = false;
  for (const SlotIndex frame : opened.slots) {
    answer.checksums.push_back(checksums_[store_->page_number(frame, shard)]);
    has_one = has_one || answer.checksums.back() != ChecksumTable::kNone;
  }
  if (!has_one) answer.checksums.clear();
  return answer;
}

void CacheService::Opened::append(Opened next) {
  if (!checksums.empty() || !next.checksums.empty()) {
    checksums.resize(slots.size(), ChecksumTable::kNone);
    next.checksums.resize(next.slots.size(), ChecksumTable::kNone);
    checksums.insert(checksums.end(), next.checksums.begin(), next.checksums.end());
  }
  slots.insert(slots.end(), next.slots.begin(), next.slots.end());
}

Result<void> CacheService::release(const Id128& connection, PinId pin) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  store_->release(*caller->holder, pin);
  return {};
}

Result<void> CacheService::corrupt(const Id128& connection, PinId pin,
                                   std::span<const std::uint32_t> places) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  for (const std::uint32_t place : places) {
    PEGA_TRY(store_->condemn(*caller->holder, pin, place));
    ++counted_.corrupt_pages;
  }
  const TimePoint now = clock_.now();
  if (!places.empty() &&
      (!last_corrupt_line_ || now - *last_corrupt_line_ >= kCorruptLineInterval)) {
    last_corrupt_line_ = now;
    kLog.error(
        "pages in the pool are not what was saved, their blocks are forgotten instance={} "
        "pages={} since_start={}",
        caller->instance->id, places.size(), counted_.corrupt_pages);
  }
  return {};
}

Result<std::vector<std::uint32_t>> CacheService::reserve(const Id128& connection, const JobId& job,
                                                         std::size_t first,
                                                         std::span<const BlockKey> keys,
                                                         bool has_more,
                                                         BlockStore::NoRoom no_room) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  const Instance& instance = *caller->instance;
  const std::uint32_t shard = instance.ranks[caller->rank].shard;
  if (!instance.is_complete()) {
    // The other ranks may have been told frames while it was complete: nobody will fill this shard.
    store_->abandon(*caller->holder, job);
    waits_.settle();
    return std::vector<std::uint32_t>(keys.size(), kNoPage);
  }
  if (instance.saver(shard) != caller->rank) {
    return fail(Errc::kInvalidArgument, "shard {} is saved by rank {}", shard,
                instance.saver(shard));
  }
  const SpaceId space = space_of(instance);
  auto reserved = store_->reserve(*caller->holder, space, job, first, keys, no_room);
  waits_.begun(job, shard, instance.shards,
               reserved.has_value() && (has_more || reserved->size() < keys.size()));
  waits_.settle();
  if (!reserved) return tl::unexpected<Error>(std::move(reserved.error()));
  const std::vector<SlotIndex>& frames = *reserved;
  if (shard == 0) {  // Once a block.
    demand_->saved(space, keys.first(frames.size()), instance.block_bytes);
  }
  if (!checksums_.is_empty()) {
    // What was in the place before may have left its checksum.
    for (const SlotIndex frame : frames) {
      if (frame != kNoSlot) checksums_.clear(store_->page_number(frame, shard));
    }
  }
  return pages_of(frames, *caller);
}

Duration CacheService::reserve_patience(const Id128& connection, std::size_t blocks) const {
  const auto found = clients_.find(connection);
  if (found == clients_.end() || !found->second->is_worker) return kReservePatience;
  const Client& caller = *found->second;
  return kReservePatience +
         time_to_make_room(blocks * caller.instance->ranks[caller.rank].page_bytes);
}

Result<std::size_t> CacheService::publish(const Id128& connection, const JobId& job,
                                          std::span<const std::uint64_t> checksums) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  if (!checksums.empty()) {
    const std::span<const SlotIndex> frames = store_->slots_of(*caller->holder, job);
    if (!frames.empty() && frames.size() != checksums.size()) {
      return fail(Errc::kInvalidArgument, "{} checksums for {} pages", checksums.size(),
                  frames.size());
    }
    const std::uint32_t shard = caller->instance->ranks[caller->rank].shard;
    for (std::size_t i = 0; i < frames.size(); ++i) {
      checksums_.set(store_->page_number(frames[i], shard), checksums[i]);
    }
  }
  const std::uint64_t sealed_before = store_->stats().insertions;
  auto left = store_->publish(*caller->holder, job, kPublishSlice);
  const std::uint64_t sealed = store_->stats().insertions - sealed_before;
  counted_.save_bytes += sealed * caller->instance->block_bytes;
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
  const bool has_more = store_->work();
  waits_.settle();
  return has_more;
}

bool CacheService::has_work() const { return store_->has_work(); }

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

// ---- for people

std::vector<CacheService::InstanceInfo> CacheService::instances() const {
  std::vector<InstanceInfo> list;
  list.reserve(instances_.size());
  for (const auto& [id, instance] : instances_) {
    InstanceInfo& info = list.emplace_back();
    info.id = id;
    info.state = instance.connected == 0     ? "disconnected"
                 : !instance.refused.empty() ? "refused: " + instance.refused
                 : instance.is_complete()    ? "connected"
                                             : "waiting for ranks";
    info.namespace_hash = instance.namespace_hash;
    info.shards = instance.shards;
    info.rank_count = static_cast<std::uint32_t>(instance.ranks.size());
    for (std::uint32_t number = 0; number < instance.ranks.size(); ++number) {
      const Rank& rank = instance.ranks[number];
      if (rank.process.is_none()) continue;
      info.ranks.push_back({.rank = number,
                            .shard = rank.shard,
                            .is_connected = !rank.worker.is_none(),
                            .build = rank.build,
                            .process = rank.process,
                            .page_bytes = rank.page_bytes,
                            .block_count = rank.block_count,
                            .node = rank.node});
    }
    info.schedulers = instance.schedulers;
    if (const auto* const space = namespaces_->find(instance.space_name)) {
      info.factors = space->factors;
      info.generation = space->generation;
    }
  }
  return list;
}

CacheService::Stats CacheService::stats() const {
  Stats stats = counted_;
  stats.store = store_->stats();
  stats.shapes = store_->shapes();
  stats.memory_bytes = store_->memory_bytes() + demand_->memory_bytes() + checksums_.memory_bytes();
  stats.clients = clients_.size();
  stats.parted = parted_.size();
  stats.instances = instances_.size();
  for (const auto& [id, instance] : instances_) {
    if (instance.connected != 0 && !instance.is_complete()) ++stats.instances_waiting;
  }
  stats.namespaces = namespaces_->all().size();
  stats.demand = demand_->windows();
  stats.next_victim_idle_s = store_->next_victim_idle_s();
  stats.waits = waits_.stats();
  return stats;
}

}  // namespace pegaflow
