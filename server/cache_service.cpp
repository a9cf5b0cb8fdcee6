#include "server/cache_service.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/page_layout.h"
#include "base/units.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"cache"};

/// Between two lines about wrong pages: memory that goes bad gives many.
constexpr Duration kCorruptLineInterval = std::chrono::seconds(10);

}  // namespace

/// One engine core. Lives while a connection, there or parted, belongs to it.
struct CacheService::Instance {
  std::string id;
  std::uint32_t index = 0;       ///< Its name in the store and in the cut.
  std::uint32_t references = 0;  ///< Clients and parted connections.
  std::uint32_t schedulers = 0;
  Id128 worker;  ///< Its connection; none while it is away. What follows is the last worker's.
  Id128 process;
  std::string build;
  NamespaceId space_name{};
  std::string namespace_hash;
  std::uint32_t rank = 0;
  std::uint64_t page_bytes = 0;
  std::uint64_t block_count = 0;
};

struct CacheService::Client {
  Id128 connection;
  Id128 process;
  std::string build;
  std::shared_ptr<void> watch;
  Instance* instance = nullptr;
  std::optional<HolderId> holder;  ///< From the moment it belongs to an instance.
  bool is_worker = false;
  bool is_scheduler = false;
  bool said_goodbye = false;
};

/// What a connection left behind that its process may still touch.
struct CacheService::Parted {
  Id128 process;
  HolderId holder{};
  Instance* instance = nullptr;
  std::shared_ptr<void> watch;
};

Result<std::unique_ptr<CacheService>> CacheService::create(const Options& options,
                                                           const Clock& clock,
                                                           EndConnection end_connection) {
  PEGA_TRY_LET(auto cut, PoolCut::create(options.cut, clock));
  PEGA_TRY_LET(auto demand, Demand::create(options.demand_windows, clock));
  return std::unique_ptr<CacheService>(new CacheService(std::move(cut), std::move(demand), options,
                                                        clock, std::move(end_connection)));
}

CacheService::CacheService(std::unique_ptr<PoolCut> cut, std::unique_ptr<Demand> demand,
                           const Options& options, const Clock& clock, EndConnection end_connection)
    : cut_(std::move(cut)),
      namespaces_(std::make_unique<NamespaceTable>(cut_->store())),
      demand_(std::move(demand)),
      // Enough for the smallest slots; memory comes with the places that are used.
      checksums_(options.cut.pool_bytes / kSlotAlignment),
      pool_bytes_(options.cut.pool_bytes),
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
  // A worker that waits for the cut has no pool, so it cannot know a slot.
  if (!cut_->is_served(caller->instance->index)) {
    return fail(Errc::kGone, "the pool is cut for another page size");
  }
  return caller;
}

bool CacheService::is_complete(const Instance& instance) const {
  return !instance.worker.is_none() && cut_->is_served(instance.index);
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
  if (client.instance != nullptr && client.holder) {
    Instance& instance = *client.instance;
    if (client.is_worker) {
      kLog.info("worker's connection ended instance={} process={}", instance.id,
                to_string(client.process));
    }
    cut_->store().holder_lost(*client.holder);
    if (cut_->store().may_touch(*client.holder)) {
      auto parted = std::make_unique<Parted>();
      parted->process = client.process;
      parted->holder = *client.holder;
      parted->instance = &instance;
      parted->watch = client.watch;
      ++instance.references;
      parted_.emplace(connection, std::move(parted));
    } else {
      cut_->store().holder_gone(*client.holder);
    }
    client.holder.reset();
    leave_instance(client);
  }
  clients_.erase(found);
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
  cut_->store().holder_gone(parted->second->holder);
  Instance& instance = *parted->second->instance;
  parted_.erase(parted);
  drop_reference(instance);
}

Result<void> CacheService::goodbye(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, client(connection));
  if (caller->holder) cut_->store().holder_gone(*caller->holder);
  caller->holder.reset();
  caller->said_goodbye = true;
  leave_instance(*caller);
  return {};
}

void CacheService::leave_instance(Client& client) {
  Instance* const instance = std::exchange(client.instance, nullptr);
  if (instance == nullptr) return;
  if (std::exchange(client.is_worker, false)) {
    instance->worker = {};
    cut_->leave(instance->index);
    namespaces_->leave(instance->space_name);
    cut_->settle();
  }
  if (std::exchange(client.is_scheduler, false)) --instance->schedulers;
  drop_reference(*instance);
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
  client.holder = cut_->store().add_holder(instance.index, client.process);
  return {};
}

Result<void> CacheService::attach(const Id128& connection, const std::string& instance) {
  PEGA_TRY_LET(Client* const caller, client(connection));
  PEGA_TRY(join(*caller, instance));
  if (!std::exchange(caller->is_scheduler, true)) ++caller->instance->schedulers;
  return {};
}

Result<CacheService::Registered> CacheService::answer(const Instance& instance) const {
  if (cut_->is_served(instance.index)) {
    return Registered{.slot_bytes = cut_->slot_bytes(), .namespace_hash = instance.namespace_hash};
  }
  return fail(Errc::kBusy,
              "pages of {} bytes need slots of {}, and the pool is cut into slots of {} that are "
              "in use; without the cache until they are not",
              instance.page_bytes, slot_bytes_for(instance.page_bytes), cut_->slot_bytes());
}

Result<CacheService::Registered> CacheService::register_rank(const Id128& connection,
                                                             const Registration& registration) {
  PEGA_TRY_LET(Client* const caller, client(connection));
  if (caller->is_worker) {
    Instance& own = *caller->instance;
    if (own.id != registration.instance || own.page_bytes != registration.page_bytes) {
      return fail(Errc::kInvalidArgument, "this connection has registered for instance {}", own.id);
    }
    cut_->settle();
    return answer(own);
  }
  if (!caller->watch) {
    return fail(
        Errc::kRefused,
        "without a pidfd that can be polled nobody could tell when this process ends, so it "
        "gets no pool (Linux 5.3 or newer is needed)");
  }
  if (registration.ranks != 1) {
    return fail(Errc::kRefused,
                "{} ranks: tensor/pipeline parallel instances come with a later version",
                registration.ranks);
  }
  // Before the namespace hears of it: a size that can never be would stay its size.
  if (registration.page_bytes == 0) return fail(Errc::kInvalidArgument, "a page of 0 bytes");
  if (registration.page_bytes > kMaxPageBytes ||
      slot_bytes_for(registration.page_bytes) > pool_bytes_) {
    return fail(Errc::kRefused, "a page of {} does not fit: {} is the limit of a page, {} the pool",
                format_bytes(registration.page_bytes), format_bytes(kMaxPageBytes),
                format_bytes(pool_bytes_));
  }
  if (parted_.size() >= max_parted_) {
    return fail(Errc::kBusy, "{} ended connections may still be copying; no room for more",
                parted_.size());
  }
  if (const auto there = instances_.find(registration.instance);
      there != instances_.end() && !there->second.worker.is_none()) {
    const Instance& other = there->second;
    if (other.process != caller->process) {
      return fail(Errc::kRefused, "instance {} is served by another process (incarnation {})",
                  other.id, to_string(other.process));
    }
    // The same process over a new connection: the old one is of no more use to it.
    end_connection_(Id128(other.worker));
  }

  std::vector<NamespaceFactor> factors;
  factors.reserve(registration.factors.size());
  for (const auto& [name, value] : registration.factors) factors.push_back({name, value});
  auto entered = namespaces_->enter(std::move(factors), registration.page_bytes);
  if (!entered) {
    if (entered.error().code == Errc::kRefused) {
      ++counted_.refused_page_size;
      kLog.error("an engine serves without the cache instance={} reason=\"{}\"",
                 registration.instance, entered.error().detail);
    }
    return tl::unexpected<Error>(std::move(entered.error()));
  }
  const NamespaceTable::Namespace& space = **entered;
  const NamespaceId space_name = space.id;
  if (Result<void> joined = join(*caller, registration.instance); !joined) {
    namespaces_->leave(space_name);
    return tl::unexpected<Error>(std::move(joined.error()));
  }
  Instance& instance = *caller->instance;
  const auto cut = cut_->enter(instance.index, registration.page_bytes);
  if (!cut) {
    namespaces_->leave(space_name);
    if (!caller->is_scheduler) {
      cut_->store().holder_gone(*caller->holder);
      caller->holder.reset();
      leave_instance(*caller);
    }
    return tl::unexpected<Error>(cut.error());
  }
  caller->is_worker = true;
  instance.worker = connection;
  instance.process = caller->process;
  instance.build = caller->build;
  instance.space_name = space_name;
  instance.namespace_hash = space.hash;
  instance.rank = registration.rank;
  instance.page_bytes = registration.page_bytes;
  instance.block_count = registration.block_count;
  auto answered = answer(instance);
  kLog.info("registered instance={} process={} namespace={} page={} {}", instance.id,
            to_string(instance.process), instance.namespace_hash, format_bytes(instance.page_bytes),
            answered ? fmt::format("slots={}", cut_->store().slot_count())
                     : fmt::format("waits=\"{}\"", answered.error().detail));
  return answered;
}

// ---- calls of a scheduler

Result<CacheService::Found> CacheService::lookup(const Id128& connection,
                                                 std::span<const BlockKey> keys) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (!is_complete(instance)) {
    counted_.lookup_blocks_not_served += keys.size();
    return Found{};
  }
  const SpaceId space = space_of(instance);
  const std::size_t blocks = cut_->store().lookup(space, keys);
  demand_->asked(space, keys, blocks, instance.page_bytes);
  return Found{.blocks = blocks, .complete = true};
}

Result<CacheService::Found> CacheService::claim(const Id128& connection, const Id128& token,
                                                std::span<const BlockKey> keys) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (!is_complete(instance)) return Found{};
  PEGA_TRY_LET(const std::size_t blocks,
               cut_->store().claim(*caller->holder, space_of(instance), keys, token));
  return Found{.blocks = blocks, .complete = true};
}

Result<void> CacheService::unclaim(const Id128& connection, const Id128& token) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  cut_->store().unclaim(*caller->holder, token);
  return {};
}

Result<std::uint64_t> CacheService::reset_cache(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (instance.worker.is_none()) {
    return fail(Errc::kGone, "no rank of instance {} is connected", instance.id);
  }
  namespaces_->reset(instance.space_name);
  return namespaces_->find(instance.space_name)->generation;
}

// ---- calls of a worker

Result<CacheService::Opened> CacheService::open(const Id128& connection, const Id128& token,
                                                std::size_t first, std::size_t count, PinId pin) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  const std::uint64_t pins_before = cut_->store().stats().pins;
  PEGA_TRY_LET(auto opened, cut_->store().open(*caller->holder, token, first, count, pin));
  // A repeated call makes no second pin, and is no second load.
  if (cut_->store().stats().pins != pins_before) {
    counted_.load_bytes += opened.slots.size() * caller->instance->page_bytes;
    counted_.load_blocks_own += opened.by_this_process;
    counted_.load_blocks_other += opened.slots.size() - opened.by_this_process;
  }
  Opened answer{.slots = std::move(opened.slots), .checksums = {}};
  const auto has_one = [this](SlotIndex slot) { return checksums_[slot] != ChecksumTable::kNone; };
  if (std::any_of(answer.slots.begin(), answer.slots.end(), has_one)) {
    answer.checksums.reserve(answer.slots.size());
    for (const SlotIndex slot : answer.slots) answer.checksums.push_back(checksums_[slot]);
  }
  return answer;
}

Result<void> CacheService::release(const Id128& connection, PinId pin) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  cut_->store().release(*caller->holder, pin);
  return {};
}

Result<void> CacheService::corrupt(const Id128& connection, PinId pin,
                                   std::span<const std::uint32_t> places) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  for (const std::uint32_t place : places) {
    PEGA_TRY(cut_->store().condemn(*caller->holder, pin, place));
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

Result<std::vector<SlotIndex>> CacheService::reserve(const Id128& connection, const JobId& job,
                                                     std::span<const BlockKey> keys) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  const SpaceId space = space_of(*caller->instance);
  demand_->saved(space, keys, caller->instance->page_bytes);
  auto slots = cut_->store().reserve(*caller->holder, space, job, keys);
  if (slots) {
    // What was in the slot before may have left its checksum.
    for (const SlotIndex slot : *slots) checksums_.clear(slot);
  }
  return slots;
}

Result<std::size_t> CacheService::publish(const Id128& connection, const JobId& job,
                                          std::span<const std::uint64_t> checksums) {
  constexpr std::size_t kSlice = 512;  // As reserve(): no turn of the loop over 500 us.
  PEGA_TRY_LET(Client* const caller, worker(connection));
  if (!checksums.empty()) {
    const std::span<const SlotIndex> slots = cut_->store().slots_of(*caller->holder, job);
    if (!slots.empty() && slots.size() != checksums.size()) {
      return fail(Errc::kInvalidArgument, "{} checksums for {} pages", checksums.size(),
                  slots.size());
    }
    for (std::size_t i = 0; i < slots.size(); ++i) checksums_.set(slots[i], checksums[i]);
  }
  const std::uint64_t sealed_before = cut_->store().stats().insertions;
  auto left = cut_->store().publish(*caller->holder, job, kSlice);
  counted_.save_bytes +=
      (cut_->store().stats().insertions - sealed_before) * caller->instance->page_bytes;
  return left;
}

Result<void> CacheService::abandon(const Id128& connection, const JobId& job) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  cut_->store().abandon(*caller->holder, job);
  return {};
}

// ---- time and background work

bool CacheService::work() {
  const bool more = cut_->store().work();
  cut_->settle();
  return more;
}

bool CacheService::has_work() const { return cut_->store().has_work(); }

std::optional<TimePoint> CacheService::next_deadline() const {
  return cut_->store().next_deadline();
}

void CacheService::expire() { cut_->store().expire(); }

// ---- for people

std::vector<CacheService::InstanceInfo> CacheService::instances() const {
  std::vector<InstanceInfo> list;
  list.reserve(instances_.size());
  for (const auto& [id, instance] : instances_) {
    InstanceInfo& info = list.emplace_back();
    info.id = id;
    info.state = instance.worker.is_none()         ? "disconnected"
                 : cut_->is_served(instance.index) ? "connected"
                                                   : "waiting for the pool to be cut";
    info.build = instance.build;
    info.process = instance.process;
    info.namespace_hash = instance.namespace_hash;
    info.rank = instance.rank;
    info.page_bytes = instance.page_bytes;
    info.block_count = instance.block_count;
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
  stats.store = cut_->store().stats();
  stats.slots = cut_->store().slot_count();
  stats.slot_bytes = cut_->slot_bytes();
  stats.cuts = cut_->cuts();
  stats.memory_bytes =
      cut_->store().memory_bytes() + demand_->memory_bytes() + checksums_.memory_bytes();
  stats.clients = clients_.size();
  stats.parted = parted_.size();
  stats.instances = instances_.size();
  for (const auto& [id, instance] : instances_) {
    if (!instance.worker.is_none() && !cut_->is_served(instance.index)) ++stats.instances_waiting;
  }
  stats.namespaces = namespaces_->all().size();
  stats.demand = demand_->windows();
  stats.next_victim_idle_s = cut_->store().next_victim_idle_s();
  return stats;
}

}  // namespace pegaflow
