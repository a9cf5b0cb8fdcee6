// Connections, the engines that they belong to, and the pages that their processes may access.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/page_layout.h"
#include "base/units.h"
#include "server/cache/cache_service_impl.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"cache"};

/// One line without control characters, for logs and terminals.
std::string printable(std::string text) {
  for (char& each : text) {
    const auto byte = static_cast<unsigned char>(each);
    if (byte < 0x20 || byte == 0x7F) each = ' ';
  }
  return text;
}

/// "64 KiB", or "64 KiB, 8 KiB" with several kinds of blocks.
std::string list_of(std::span<const std::uint64_t> page_bytes) {
  std::string list;
  for (const std::uint64_t bytes : page_bytes) {
    if (!list.empty()) list += ", ";
    list += format_bytes(bytes);
  }
  return list;
}

/// The rules and the page sizes of a rank, kind by kind. Without rules it has one kind, of which
/// prompts need a prefix.
struct Pages {
  engine::BlockKinds rules;
  std::vector<std::uint64_t> bytes;
};

Pages registered_pages(const Registration& registration) {
  if (registration.kinds.empty()) return {.rules = {}, .bytes = {registration.page_bytes}};
  Pages pages{.rules = {.kinds = {},
                        .unit_tokens = registration.unit_tokens,
                        .alignment_tokens = registration.alignment_tokens},
              .bytes = {}};
  for (const RegisteredKind& kind : registration.kinds) {
    pages.rules.kinds.push_back({.rule = static_cast<engine::KindRule>(kind.rule),
                                 .tokens = kind.tokens,
                                 .block_tokens = kind.block_tokens});
    pages.bytes.push_back(kind.page_bytes);
  }
  return pages;
}

}  // namespace

// ---- connections

Result<void> CacheService::connected(const Id128& connection, Hello hello) {
  if (hello.process.is_none()) {
    return fail(Errc::kInvalidArgument, "hello: the client sent no incarnation");
  }
  if (const Id128& previous = hello.previous_connection; !previous.is_none()) {
    if (const auto there = clients_.find(previous); there != clients_.end()) {
      if (there->second->process != hello.process) {
        return fail(Errc::kInvalidArgument,
                    "hello: the previous connection belongs to another process");
      }
      // This node has not seen its end yet; the client has.
      end_connection_(previous);
    }
    if (const auto detached = detached_.find(previous); detached != detached_.end()) {
      if (detached->second->process != hello.process) {
        return fail(Errc::kInvalidArgument,
                    "hello: the previous connection belongs to another process");
      }
      if (hello.quiesced) end_detached(detached);
    }
  }
  if (hello.quiesced) former_client_gone(hello.process);
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
      kLog.info("connection of a worker ended instance={} rank={} process={}", instance.id,
                client.rank, to_string(client.process));
    }
    store_->holder_lost(*client.holder);
    if (store_->may_touch(*client.holder)) {
      auto detached = std::make_unique<Detached>();
      detached->process = client.process;
      detached->holder = *client.holder;
      detached->instance = &instance;
      detached->watch = client.watch;
      ++instance.references;
      detached_.emplace(connection, std::move(detached));
    } else {
      store_->holder_gone(*client.holder);
    }
    client.holder.reset();
    leave_instance(client);
  }
  clients_.erase(found);
  if (!detached_.contains(connection)) on_client_end_(connection);
  waits_.settle();
}

void CacheService::process_gone(const Id128& connection) {
  // The end of a process may be detected before the end of its socket.
  if (clients_.contains(connection)) end_connection_(connection);
  if (const auto detached = detached_.find(connection); detached != detached_.end()) {
    kLog.info("process ended, its slots are free again instance={} process={}",
              detached->second->instance->id, to_string(detached->second->process));
    end_detached(detached);
  }
}

void CacheService::end_detached(
    std::unordered_map<Id128, std::unique_ptr<Detached>>::iterator detached) {
  store_->holder_gone(detached->second->holder);
  Instance& instance = *detached->second->instance;
  on_client_end_(detached->first);
  detached_.erase(detached);
  drop_reference(instance);
}

Result<void> CacheService::goodbye(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, client(connection));
  if (caller->holder) store_->holder_gone(*caller->holder);
  caller->holder.reset();
  caller->said_goodbye = true;
  on_client_end_(connection);
  caller->declined.reset();
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
    // Without this rank none of the jobs in flight can be sealed.
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
  if (client.declined) {
    return fail(Errc::kInvalidArgument, "this connection has declined for instance {}",
                client.declined->instance);
  }
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

Result<void> CacheService::describe(const Id128& connection, EngineInfo engine) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  engine.device = printable(std::move(engine.device));
  caller->engine = std::move(engine);
  return {};
}

Result<void> CacheService::decline(const Id128& connection, Decline decline) {
  PEGA_TRY_LET(Client* const caller, client(connection));
  if (caller->instance != nullptr) {
    return fail(Errc::kInvalidArgument, "decline: this connection belongs to instance {}",
                caller->instance->id);
  }
  const bool is_first = !caller->declined;
  const auto has_declined = [](const auto& row) { return row.second->declined.has_value(); };
  if (is_first && std::count_if(clients_.begin(), clients_.end(), has_declined) >=
                      static_cast<std::ptrdiff_t>(kMaxDeclined)) {
    return fail(Errc::kBusy, "decline: {} connections have declined already", kMaxDeclined);
  }
  decline.detail = printable(std::move(decline.detail));
  caller->declined = std::move(decline);
  const Decline& why = *caller->declined;
  if (is_first) {  // Logged once for each connection.
    kLog.warn("an engine does not use the cache instance={} side={} rank={} reason={}: {}",
              printable(why.instance), to_string(why.side), why.rank, to_string(why.reason),
              why.detail);
  }
  return {};
}

std::map<std::string, std::vector<CacheService::DeclinedInfo>> CacheService::declined() const {
  std::map<std::string, std::vector<DeclinedInfo>> sides;
  for (const auto& [connection, client] : clients_) {
    if (!client->declined) continue;
    sides[client->declined->instance].push_back({*client->declined, client->build});
  }
  for (auto& [id, each] : sides) {
    std::sort(each.begin(), each.end(), [](const DeclinedInfo& a, const DeclinedInfo& b) {
      return std::pair(a.decline.side, a.decline.rank) < std::pair(b.decline.side, b.decline.rank);
    });
  }
  return sides;
}

Result<void> CacheService::check_cells(const Registration& registration) const {
  const std::uint32_t cells = registration.cells;
  // A page of several cells is one contiguous run of the pool: no gap is behind any of them.
  if (cells != 0 && registration.shards > 1 &&
      registration.page_bytes % (cells * kSlotAlignment) != 0) {
    return fail(Errc::kRefused,
                "register: pages of {} bytes for {} cells: a cell has to be a multiple of {} bytes",
                registration.page_bytes, cells, kSlotAlignment);
  }
  const auto known = instances_.find(registration.instance);
  if (known == instances_.end() || known->second.connected == 0 || known->second.cells == cells) {
    return {};
  }
  return fail(Errc::kInvalidArgument,
              "register: rank {} reports {} cells, others of instance {} report {}",
              registration.rank, cells, known->second.id, known->second.cells);
}

Result<void> CacheService::check_rank(const Client& caller, const Registration& registration) {
  const Pages pages = registered_pages(registration);
  if (!registration.kinds.empty() && registration.page_bytes != 0) {
    return fail(
        Errc::kInvalidArgument,
        "register: pageBytes {} beside {} kinds of blocks, which have their own: it must be "
        "0",
        registration.page_bytes, registration.kinds.size());
  }
  if (*std::max_element(pages.bytes.begin(), pages.bytes.end()) == 0) {
    return fail(Errc::kInvalidArgument, "register: a page has 0 bytes");
  }
  for (const std::uint64_t bytes : pages.bytes) {
    if (bytes > kMaxPageBytes || slot_bytes_for(bytes) > pool_bytes_) {
      return fail(Errc::kRefused,
                  "register: a page of {} does not fit: the limit is {}, the pool has {}",
                  format_bytes(bytes), format_bytes(kMaxPageBytes), format_bytes(pool_bytes_));
    }
  }
  PEGA_TRY(check_cells(registration));
  if (!pages.rules.kinds.empty()) {
    if (auto checked = pages.rules.check(); !checked) {
      return fail(Errc::kInvalidArgument, "register: {}", checked.error().detail);
    }
  }
  if (registration.shards > engine::kMaxShards || registration.ranks > engine::kMaxShards) {
    return fail(Errc::kRefused, "register: {} ranks, the limit is {}", registration.ranks,
                engine::kMaxShards);
  }
  const auto known = instances_.find(registration.instance);
  if (known == instances_.end()) return {};
  const Instance& instance = known->second;
  if (instance.connected != 0 &&
      (instance.ranks.size() != registration.ranks || instance.shards != registration.shards)) {
    return fail(
        Errc::kInvalidArgument,
        "register: rank {} reports {} ranks and {} shards, others of instance {} report {} and {}",
        registration.rank, registration.ranks, registration.shards, instance.id,
        instance.ranks.size(), instance.shards);
  }
  if (instance.connected != 0 && instance.rules != pages.rules) {
    return fail(Errc::kInvalidArgument,
                "register: rank {} has kinds of blocks ({}), others of instance {} have ({})",
                registration.rank, engine::to_string(pages.rules), instance.id,
                engine::to_string(instance.rules));
  }
  if (registration.rank >= instance.ranks.size()) return {};
  const Rank& rank = instance.ranks[registration.rank];
  if (rank.worker.is_none()) return {};
  if (rank.process != caller.process) {
    return fail(Errc::kRefused, "rank {} of instance {} is served by another process ({})",
                registration.rank, instance.id, to_string(rank.process));
  }
  // The same process over a new connection: the old one is obsolete.
  end_connection_(Id128(rank.worker));
  return {};
}

Result<void> CacheService::enter_namespace(Client& caller, const Registration& registration,
                                           engine::NamespaceId& entered) {
  std::vector<engine::NamespaceFactor> factors;
  factors.reserve(registration.factors.size());
  for (const auto& [name, value] : registration.factors) factors.push_back({name, value});
  PEGA_TRY_LET(const engine::NamespaceTable::Namespace* const space,
               namespaces_->enter(std::move(factors)));
  entered = space->id;
  const auto check = [&]() -> Result<void> {
    const Pages pages = registered_pages(registration);
    PEGA_TRY(namespaces_->fits(entered, registration.shard, registration.shards, pages.rules,
                               pages.bytes, std::max(1U, registration.cells)));
    PEGA_TRY(join(caller, registration.instance));
    if (caller.instance->connected != 0 && caller.instance->space_name != entered) {
      return fail(Errc::kInvalidArgument,
                  "register: rank {} has another namespace than others of instance {}",
                  registration.rank, caller.instance->id);
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
  if (caller->is_worker) return register_again(*caller, registration);
  PEGA_TRY(check_new_rank(*caller, registration));
  engine::NamespaceId space_name{};
  if (auto entered = enter_namespace(*caller, registration, space_name); !entered) {
    if (caller->instance != nullptr && !caller->is_scheduler) drop_membership(*caller);
    if (entered.error().code == Errc::kRefused) {
      ++counted_.refused_page_size;
      kLog.error("an engine runs without the cache instance={} reason=\"{}\"",
                 registration.instance, entered.error().detail);
    }
    return tl::unexpected<Error>(std::move(entered.error()));
  }
  Instance& instance = *caller->instance;
  add_rank(*caller, registration, space_name);
  if (instance.connected != instance.ranks.size()) return Registered{instance.namespace_hash};
  const auto completed = complete(instance);
  if (!completed && (instance.ranks.size() == 1 || completed.error().code == Errc::kBusy)) {
    // It receives the reason at once, and leaves no trace: no other rank waits for it, or it
    // registers again soon.
    withdraw_rank(*caller);
    return tl::unexpected<Error>(completed.error());
  }
  return Registered{instance.namespace_hash};
}

Result<CacheService::Registered> CacheService::register_again(
    const Client& caller, const Registration& registration) const {
  const Instance& own = *caller.instance;
  const Pages pages = registered_pages(registration);
  if (own.id != registration.instance || caller.rank != registration.rank ||
      own.ranks[caller.rank].shard != registration.shard ||
      own.ranks[caller.rank].cells != std::max(1U, registration.cells) ||
      own.ranks[caller.rank].page_bytes != pages.bytes || own.rules != pages.rules) {
    return fail(Errc::kInvalidArgument, "this connection has registered for instance {}", own.id);
  }
  return Registered{own.namespace_hash};
}

Result<void> CacheService::check_new_rank(const Client& caller, const Registration& registration) {
  if (!caller.watch) {
    return fail(
        Errc::kRefused,
        "without a pidfd that can be polled the end of this process cannot be detected, so it "
        "gets no pool (Linux 5.3 or newer is needed)");
  }
  // Before it enters the namespace: an impossible size would stay the size of the namespace.
  PEGA_TRY(check_rank(caller, registration));
  if (detached_.size() >= max_detached_) {
    return fail(Errc::kBusy,
                "register: {} ended connections may still be copying, the limit is reached",
                detached_.size());
  }
  return {};
}

void CacheService::add_rank(Client& caller, const Registration& registration,
                            engine::NamespaceId space_name) {
  Instance& instance = *caller.instance;
  const Pages pages = registered_pages(registration);
  if (instance.connected == 0) {
    instance.ranks.assign(registration.ranks, Rank{});
    instance.shards = registration.shards;
    instance.cells = registration.cells;
    instance.rules = pages.rules;
    instance.most_kinds = std::max(instance.most_kinds, pages.rules.kinds.size());
    instance.block_bytes.clear();
    instance.space_name = space_name;
    instance.namespace_hash = namespaces_->find(space_name)->hash;
  }
  caller.is_worker = true;
  caller.rank = registration.rank;
  Rank& rank = instance.ranks[registration.rank];
  rank = {.worker = caller.connection,
          .process = caller.process,
          .build = caller.build,
          .shard = registration.shard,
          .cells = std::max(1U, registration.cells),
          .page_bytes = pages.bytes,
          .block_count = registration.block_count,
          .numa_node = registration.node,
          .pool_backend = {}};
  if (registration.reads_pools && registration.direct->network) {
    rank.pool_backend = registration.direct->network->fabric.backend;
    rank.reads_pools_slowly = registration.reads_pools_slowly;
    rank.segments = std::max<std::uint64_t>(1, registration.direct->segments.size());
  }
  store_->set_shard(*caller.holder, instance.writer_of(registration.shard), instance.writers());
  ++instance.connected;
  kLog.info("registered instance={} rank={} of={} process={} namespace={} page={}", instance.id,
            registration.rank, instance.ranks.size(), to_string(rank.process),
            instance.namespace_hash, list_of(rank.page_bytes));
}

void CacheService::drop_membership(Client& client) {
  store_->holder_gone(*client.holder);
  client.holder.reset();
  leave_instance(client);
}

void CacheService::withdraw_rank(Client& caller) {
  const std::string id = caller.instance->id;
  const Id128 scheduler = caller.scheduler;
  const bool is_scheduler = caller.is_scheduler;
  drop_membership(caller);
  // Its side as a scheduler stays.
  if (is_scheduler) static_cast<void>(attach(caller.connection, id, scheduler));
}

Result<std::vector<engine::Shape>> CacheService::shapes_of(const Instance& instance) const {
  std::vector<engine::Shape> shapes(instance.ranks.front().page_bytes.size());
  for (std::uint32_t shard = 0; shard < instance.shards; ++shard) {
    const std::uint32_t number = instance.saver(shard);
    const Rank& saver = instance.ranks[number];
    if (!instance.holds(number, shard)) {
      return fail(Errc::kRefused, "no rank of instance {} holds shard {}", instance.id, shard);
    }
    for (std::size_t kind = 0; kind < shapes.size(); ++kind) {
      shapes[kind].shards.push_back({.page_bytes = saver.page_bytes[kind] / saver.cells,
                                     .numa_node = numa_part_of(instance, shard)});
    }
  }
  for (std::size_t kind = 0; kind < shapes.size(); ++kind) {
    const auto is_empty = [](const engine::Shape::Shard& shard) { return shard.page_bytes == 0; };
    if (std::all_of(shapes[kind].shards.begin(), shapes[kind].shards.end(), is_empty)) {
      return fail(Errc::kRefused,
                  "register: pages of 0 bytes for kind {} on all ranks of instance {}: a kind "
                  "without a page is not registered",
                  kind, instance.id);
    }
  }
  for (const Rank& rank : instance.ranks) {
    for (std::size_t kind = 0; kind < shapes.size(); ++kind) {
      const std::uint64_t bytes = shapes[kind].shards[rank.shard].page_bytes * rank.cells;
      if (rank.page_bytes[kind] != bytes) {
        return fail(Errc::kRefused,
                    "register: pages of {} and {} bytes for shard {} of instance {}",
                    rank.page_bytes[kind], bytes, rank.shard, instance.id);
      }
    }
  }
  return shapes;
}

Result<void> CacheService::complete(Instance& instance) {
  const auto settle = [&]() -> Result<void> {
    PEGA_TRY_LET(const std::vector<engine::Shape> shapes, shapes_of(instance));
    PEGA_TRY(namespaces_->fix_shapes(instance.space_name, instance.rules, shapes));
    for (const Rank& rank : instance.ranks) {  // It may have registered before there were shapes.
      PEGA_TRY(namespaces_->fits(instance.space_name, rank.shard, instance.shards, instance.rules,
                                 rank.page_bytes, rank.cells));
    }
    instance.block_bytes.clear();
    for (const engine::Shape& shape : shapes) {
      std::uint64_t bytes = 0;
      for (const engine::Shape::Shard& shard : shape.shards) bytes += shard.page_bytes;
      instance.block_bytes.push_back(bytes);
    }
    return {};
  };
  if (auto settled = settle(); !settled) {
    Error error = std::move(settled.error());
    if (error.code != Errc::kBusy) {
      error.code = Errc::kRefused;
      instance.refused = error.detail;
      ++counted_.refused_page_size;
      kLog.error("an engine runs without the cache instance={} reason=\"{}\"", instance.id,
                 instance.refused);
    }
    return tl::unexpected<Error>(std::move(error));
  }
  name_spaces(instance);
  kLog.info("complete instance={} ranks={} shards={}", instance.id, instance.ranks.size(),
            instance.shards);
  return {};
}

std::uint32_t CacheService::numa_part_of(const Instance& instance, std::uint32_t shard) const {
  if (parts_ < 2) return 0;
  // The cells of a block are adjacent, for ranks that hold several of them.
  if (instance.cells != 0) shard = 0;
  const auto found = part_of_numa_node_.find(instance.ranks[instance.saver(shard)].numa_node);
  // A worker without a NUMA node receives the parts in turn, each engine from another one on.
  return found != part_of_numa_node_.end() ? found->second : (instance.index + shard) % parts_;
}

}  // namespace pegaflow::server
