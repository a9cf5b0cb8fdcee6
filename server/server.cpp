#include "server/server.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <nlohmann/json.hpp>

#include "base/assert.h"
#include "base/log.h"
#include "base/os/default_signals.h"
#include "base/os/numa.h"
#include "base/units.h"
#include "capnp/wire/rpc_error.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/descriptors.h"
#include "server/direct/direct_reads.h"
#include "server/http/admin.h"
#include "server/http/http_server.h"
#include "server/main_loop.h"
#include "server/nodes.h"
#include "server/pool/keeper_link.h"
#include "server/pool/pool_keeping.h"
#include "server/pool/pool_preparation.h"
#include "server/prefetch/prefetches.h"
#include "server/rpc/client_gate.h"
#include "server/rpc/process_watch.h"
#include "server/rpc/rpc_server.h"
#include "server/ssd/ssd_tier.h"
#include "version.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"server"};

/// How often the server looks whether its keeper lives.
constexpr kj::Duration kTendInterval = 1 * kj::SECONDS;
/// For the epochs of other nodes: then the blocks of a former server are dropped, since no engine
/// uses the cache meanwhile.
constexpr kj::Duration kEpochPatience = 30 * kj::SECONDS;

/// The part of the pool that prefetches may fill, unless configured: 1 / this.
constexpr std::uint64_t kPrefetchPart = 8;

/// Writes a temporary file and renames it, so that a reader never sees half of it.
Result<void> write_ready_file(const std::string& path, const nlohmann::json& content) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::trunc);
  file << content.dump() << '\n';
  file.close();
  std::error_code problem;
  if (file) std::filesystem::rename(temporary, path, problem);
  if (!file || problem) {
    return fail(Errc::kRefused, "--ready-file {}: cannot be written", path);
  }
  return {};
}

/// Program and version, for the logs of clients and peers.
std::string build() { return fmt::format("pegaflow-server {}", kVersion); }

/// The part of the pool near each NUMA node: its own, or that of the nearest NUMA node with a part.
std::map<std::int32_t, std::uint32_t> part_of_numa_node(const NumaTopology& topology,
                                                        const engine::PoolPlacement& placement) {
  std::map<std::int32_t, std::uint32_t> parts;
  if (placement.ranges.empty()) return parts;
  for (const NumaNode& node : topology.nodes()) {
    if (const auto part = topology.nearest(node.number, placement.numa_nodes)) {
      parts.emplace(static_cast<std::int32_t>(node.number), static_cast<std::uint32_t>(*part));
    }
  }
  return parts;
}

/// Logs how the placement differs from the requested one.
void log_placement(const engine::PoolPlacement& placement) {
  if (!placement.refused.empty()) {
    kLog.warn(
        "the pool is not placed by NUMA node, engines may access remote memory "
        "reason=\"{}\"",
        placement.refused);
  }
  constexpr double kEnough = 0.95;
  if (placement.in_place && *placement.in_place < kEnough) {
    kLog.warn("a NUMA node had too little free memory for its part of the pool in_place={:.2f}",
              *placement.in_place);
  }
}

/// The parts of a server, in the order in which they start; they end in reverse.
class Server final : private kj::TaskSet::ErrorHandler {
 public:
  Server(const ServerOptions& options, std::vector<std::uint32_t> allowed_uids,
         std::vector<std::chrono::seconds> windows, engine::EvictionKind eviction,
         engine::NumaPolicy numa, PoolPreparation::Keep keep, SocketLock lock,
         std::optional<Nodes::Plan> nodes)
      : options_(options),
        allowed_uids_(std::move(allowed_uids)),
        windows_(std::move(windows)),
        eviction_(eviction),
        numa_(numa),
        keep_(keep),
        lock_(std::move(lock)),
        nodes_plan_(std::move(nodes)),
        io_(kj::setupAsyncIo()),
        questions_(2 * (HttpServer::kQuestions + HttpServer::kReaders)),
        tasks_(*this) {}

  Result<void> run(TcpListener http_listener, std::string token, RouterGuard routers) {
    http_address_ = http_listener.address;
    HttpServer::Options http_options;
    http_options.token = std::move(token);
    http_options.routers = std::move(routers);
    http_options.allowed_uids = allowed_uids_;
    http_options.health = {.is_ok = false,
                           .status = "preparing the pool",
                           .pool_bytes = options_.pool_size_bytes,
                           .done_bytes = 0};
#ifdef PEGA_TEST_HOOKS
    http_options.test_hooks = true;
#endif
    PEGA_TRY_LET(Listener http_socket, Listener::open_http(lock_, options_.socket_group));
    http_socket_ = http_socket.path().string();
    PEGA_TRY_LET(http_, HttpServer::start(std::move(http_listener), std::move(http_socket),
                                          std::move(http_options), questions_));
    kLog.info("serving http address={}", http_address_);
    kLog.info("serving http socket={}", http_socket_);
    tasks_.add(wait_for_signal());
    PEGA_TRY_LET(
        preparation_,
        PoolPreparation::start(
            {.pool = {.size_bytes = options_.pool_size_bytes,
                      .huge_pages = options_.use_hugepages ? engine::Pool::HugePages::kRequired
                                                           : engine::Pool::HugePages::kIfReserved,
                      .numa = numa_,
                      .numa_nodes = topology_.memory_nodes()},
             .any_size = !options_.pool_size_is_chosen,
             .patience = options_.pool_wait,
             .keep = keep_,
             .keeper = keeper_path(lock_.socket())},
            clock_));
    watch_mailbox(pool_news_, preparation_->news(), [this]() { read_pool_news(); });

    run_loop(io_, clock_, counters_.turns, counters_.turns_cpu,
             [this]() { return is_stopping_ || failure_; });

    publish({.is_ok = false, .status = "stopping", .pool_bytes = 0, .done_bytes = 0});
    // While what receives its blocks exists.
    if (ssd_ != nullptr) ssd_->close();
    if (!options_.ready_file.empty()) ::unlink(options_.ready_file.c_str());
    if (failure_) return tl::unexpected<Error>(std::move(*failure_));
    if (keeping_ != nullptr && keeping_->report().has_keeper) {
      kLog.info(
          "the pool stays in memory for the next server, `pegaflow-server --release` frees it "
          "pool={} keeper={}",
          format_bytes(pool_->size_bytes()), keeping_->report().socket);
    }
    return {};
  }

 private:
  /// Calls `read` in an event-loop iteration once `mailbox` is readable.
  template <typename T>
  void watch_mailbox(kj::Own<kj::UnixEventPort::FdObserver>& observer, Mailbox<T>& mailbox,
                     std::function<void()> read) {
    observer = kj::heap<kj::UnixEventPort::FdObserver>(io_.unixEventPort, mailbox.fd(),
                                                       kj::UnixEventPort::FdObserver::OBSERVE_READ);
    tasks_.add(read_when_readable(*observer, std::move(read)));
  }
  static kj::Promise<void> read_when_readable(kj::UnixEventPort::FdObserver& observer,
                                              std::function<void()> read) {
    return observer.whenBecomesReadable().then([&observer, read = std::move(read)]() mutable {
      read();
      return read_when_readable(observer, std::move(read));
    });
  }

  kj::Promise<void> wait_for_signal() {
    return io_.unixEventPort.onSignal(SIGTERM)
        .exclusiveJoin(io_.unixEventPort.onSignal(SIGINT))
        .then([this](siginfo_t info) {
          kLog.info("stopping signal={}", info.si_signo == SIGTERM ? "SIGTERM" : "SIGINT");
          if (ssd_ == nullptr || !is_serving_) {
            is_stopping_ = true;
          } else {
            tasks_.add(ssd_->drain(options_.ssd_drain).then([this]() { is_stopping_ = true; }));
          }
          // From now on a signal ends the process, even if a step of the shutdown hangs.
          std::signal(SIGTERM, SIG_DFL);
          std::signal(SIGINT, SIG_DFL);
          sigset_t both;
          sigemptyset(&both);
          sigaddset(&both, SIGTERM);
          sigaddset(&both, SIGINT);
          ::pthread_sigmask(SIG_UNBLOCK, &both, nullptr);
        });
  }

  void publish(Health health) { http_->publish_health(std::move(health)); }

  /// Called again whenever the state of a peer changes.
  void publish_ready() {
    if (!is_serving_ || is_stopping_) return;
    Health health{.is_ok = true,
                  .status = "ok",
                  .pool_bytes = pool_->size_bytes(),
                  .done_bytes = pool_->size_bytes(),
                  .placement = pool_->placement()};
    if (nodes_ != nullptr) {
      const NodesReport report = nodes_->report();
      health.node = to_string(report.node);
      health.lane = report.lanes.front();
      health.why_not_rdma = report.why_not_rdma;
      health.cards = report.cards;
      health.refused_cards = report.refused_cards;
      health.ucx_version = report.ucx_version;
      health.ucx_library = report.ucx_library;
      health.peer_listen = report.listen;
      health.directory = report.directory;
      for (const NodesReport::Peer& peer : report.peers) {
        health.peers.push_back({.address = peer.address,
                                .state = std::string(to_string(peer.link.state)),
                                .node = peer.link.state == cluster::PeerLink::State::kReady
                                            ? to_string(peer.link.node)
                                            : std::string(),
                                .why = peer.link.why,
                                .lane = peer.link.lane,
                                .lane_why = peer.link.lane_why});
      }
    }
    if (ssd_ != nullptr) {
      for (const SsdReport::OneDisk& disk : ssd_->report().disks) health.disks.push_back(disk);
    }
    health.kept = report_kept();
    publish(std::move(health));
  }

  void read_pool_news() {
    preparation_->news().drain([this](PoolNews&& news) {
      if (news.error) {
        failure_ = std::move(news.error);
      } else if (!news.prepared) {
        publish({.is_ok = false,
                 .status = news.status,
                 .pool_bytes = options_.pool_size_bytes,
                 .done_bytes = news.done_bytes});
      } else if (auto served = serve(std::move(*news.prepared)); !served) {
        failure_ = std::move(served.error());
      }
    });
  }

  Result<void> serve(PreparedPool prepared) {
    pool_ = std::move(prepared.pool);
    tables_ = std::move(prepared.tables);
    const auto [connections, from_nodes] = connections_that_fit(options_);
    if (nodes_plan_) nodes_plan_->most_connections = from_nodes;
    if (tables_ != nullptr) {
      keeping_ = std::make_unique<PoolKeeping>(keep_, keeper_path(lock_.socket()), *pool_, *tables_,
                                               std::move(prepared.keeper), clock_);
    }
    PEGA_TRY(start_cache(connections, prepared.is_adopted, prepared.clients));
    watch_former(std::move(prepared.clients));
    PEGA_TRY(start_ssd());
    direct_ = std::make_unique<DirectReads>(*service_, io_.provider->getTimer(), clock_);
    PEGA_TRY(start_nodes());
    make_context();
    start_rpc(connections);

    auto listener = Listener::open(lock_, options_.socket_group);
    if (!listener) return tl::unexpected<Error>(std::move(listener.error()));
    listener_.emplace(std::move(*listener));
    rpc_->serve(client_service(*context_), listener_->fd());
    is_serving_ = true;
    publish_ready();
    log_ready();
    return announce_ready();
  }

  [[nodiscard]] CacheService::Options cache_options(std::size_t connections) const {
    engine::BlockStore::Options store;
    store.pool_bytes = pool_->size_bytes();
    store.instance_share = static_cast<double>(options_.instance_share_percent) / 100;
    store.server_share = static_cast<double>(options_.node_share_percent) / 100;
    store.reservation_timeout = options_.reservation_timeout;
    store.eviction = eviction_;
    store.kept = tables_.get();
    store.journal_first = Id128::random().high >> 2;  // Far from that of any other process.
    const engine::PoolPlacement& placement = pool_->placement();
    store.numa_nodes =
        std::max<std::uint32_t>(1, static_cast<std::uint32_t>(placement.ranges.size()));
    return {.store = store,
            .part_of_numa_node = part_of_numa_node(topology_, placement),
            .max_detached = connections,
            .demand_windows = windows_};
  }

  Result<void> make_cache(std::size_t connections, const CacheService::Former& former) {
    PEGA_TRY_LET(service_, CacheService::create(cache_options(connections), clock_,
                                                [this](const Id128& connection) {
                                                  rpc_->end_connection(connection);
                                                }));
    if (tables_ == nullptr) return {};
    service_->on_client_end([this](const Id128& connection) { keeping_->forget(connection); });
    return service_->continue_from(former);
  }

  Result<void> start_cache(std::size_t connections, bool is_adopted,
                           const std::vector<KeptPool::Client>& clients) {
    log_placement(pool_->placement());
    CacheService::Former former{
        .clients = {}, .adopt = is_adopted, .waits_for_nodes = waits_for_nodes()};
    for (const KeptPool::Client& client : clients) {
      former.clients.push_back(client.process);
      if (!keeping_->admit(client.process, client.process, client.pidfd.get())) {
        return fail(Errc::kIo, "no descriptor is left for the clients of the former server");
      }
    }
    const TimePoint began = clock_.now();
    auto made = make_cache(connections, former);
    if (!made && made.error().code == Errc::kCorrupt) {
      kLog.error("the blocks of the former server are lost reason=\"{}\"", made.error().detail);
      // Nothing is known of its frames: none is used before its clients have ended their copies.
      service_.reset();
      PEGA_TRY_LET(engine::KeptTables fresh,
                   engine::KeptTables::create({.pool = Id128::random(),
                                               .pool_bytes = pool_->size_bytes(),
                                               .numa_nodes = tables_->layout().numa_nodes},
                                              clock_));
      *tables_ = std::move(fresh);
      PEGA_TRY(keeping_->replace_tables(*tables_));
      former.adopt = false;
      made = make_cache(connections, former);
    }
    PEGA_TRY(std::move(made));
    adopt_seconds_ = std::chrono::duration<double>(clock_.now() - began).count();
    background_ = std::make_unique<Background>(*service_, io_.provider->getTimer(), clock_);
    if (keeping_ != nullptr) tasks_.add(tend_keeper());
    return {};
  }

  /// Whether blocks of an earlier process wait for the epochs of other nodes.
  [[nodiscard]] bool waits_for_nodes() const {
    return nodes_plan_ && !(options_.peers.empty() && options_.directory.empty()) &&
           !options_.ssd_serve_before_peers;
  }

  /// Detects the end of the former server's clients, which may not come back.
  void watch_former(std::vector<KeptPool::Client> clients) {
    for (KeptPool::Client& client : clients) {
      const auto gone = [this, process = client.process]() {
        tasks_.add(kj::evalLater([this, process]() {
          service_->former_client_gone(process);
          background_->poke();
        }));
      };
      auto watch = ProcessWatch::start(io_.unixEventPort, std::move(client.pidfd), Peer{}, gone);
      if (watch) {
        former_watches_.push_back(std::move(*watch));
      } else {
        gone();  // It has ended already.
      }
    }
    if (waits_for_nodes() && service_->former().waits_for_nodes) {
      tasks_.add(io_.provider->getTimer().afterDelay(kEpochPatience).then([this]() {
        service_->drop_unconfirmed();
        background_->poke();
        publish_ready();
      }));
    }
  }

  kj::Promise<void> tend_keeper() {
    kj::Timer& timer = io_.provider->getTimer();
    kj::Promise<void> due = keeping_->until_due(io_.unixEventPort, timer);
    // The report names the clients of the former server until the last one has ended.
    if (former_clients_ != 0 || service_->former().clients != 0) {
      due = due.exclusiveJoin(timer.afterDelay(kTendInterval));
    }
    return due.then([this]() {
      const KeptReport before = keeping_->report();
      keeping_->tend();
      const bool is_changed = keeping_->report().has_keeper != before.has_keeper;
      if (is_changed || service_->former().clients != former_clients_) {
        former_clients_ = service_->former().clients;
        publish_ready();
      }
      return tend_keeper();
    });
  }

  /// Waits for locks and disks, which may hang: a signal ends it.
  Result<std::unique_ptr<SsdDisks>> open_disks(const SsdDisks::Options& disks) {
    const DefaultSignals ends_at_once;
    return SsdDisks::open(disks, clock_);
  }

  Result<void> start_ssd() {
    if (options_.ssd_cache_path.empty()) {
      // The disks of the former server have been waited for.
      return tables_ == nullptr ? Result<void>() : record_disks(*tables_, {});
    }
    publish({.is_ok = false,
             .status = "opening the SSD cache",
             .pool_bytes = options_.pool_size_bytes,
             .done_bytes = options_.pool_size_bytes});
    SsdDisks::Options disks;
    disks.paths = options_.ssd_cache_path;
    disks.capacity_bytes = options_.ssd_cache_capacity_bytes;
    disks.segment_bytes = options_.ssd_segment_bytes;
    disks.format = options_.ssd_format;
    disks.index_bytes = options_.ssd_index_bytes;
    disks.lock_wait = options_.pool_wait;
    PEGA_TRY_LET(disks.backend, options_.ssd_backend());
    if (pool_->page_bytes() > 4096) disks.huge_memory = {pool_->bytes()};
    PEGA_TRY_LET(auto opened, open_disks(disks));
    if (tables_ != nullptr) PEGA_TRY(record_disks(*tables_, opened->paths()));
    ssd_ = std::make_unique<SsdTier>(
        std::move(opened), *service_, pool_->bytes(), io_.provider->getTimer(), clock_,
        SsdTier::Options{.write_budget = options_.ssd_write_budget_bytes,
                         .write_ahead = options_.ssd_write_ahead_bytes,
                         .waits_for_nodes = waits_for_nodes()},
        [this]() { publish_ready(); });
    watch_mailbox(ssd_news_, ssd_->completions(), [this]() { ssd_->read_completions(); });
    service_->on_reset([this]() {
      background_->poke();
      tasks_.add(kj::evalLater([this]() { return ssd_->record_epochs().ignoreResult(); }));
    });
    ssd_fetches_ = std::make_unique<Fetches>(*service_, nodes_plan_ ? nullptr : &ssd_->source(),
                                             *background_, io_.provider->getTimer(), clock_,
                                             Fetches::Options{.deadline = options_.fetch_deadline});
    return {};
  }

  /// Once every peer has been connected, its epochs are known here.
  void note_peers() {
    const bool disks_wait = ssd_ != nullptr && ssd_->waits_for_nodes();
    if (nodes_ == nullptr || (!disks_wait && !service_->former().waits_for_nodes)) return;
    for (const NodesReport::Peer& peer : nodes_->report().peers) {
      if (peer.link.state == cluster::PeerLink::State::kReady) greeted_.insert(peer.address);
      const bool is_this_node = peer.link.state == cluster::PeerLink::State::kSelf;
      if (!is_this_node && !greeted_.contains(peer.address)) return;
    }
    if (!nodes_->knows_directory_epochs()) return;
    if (ssd_ != nullptr) ssd_->confirm_epochs();
    service_->confirm_epochs();
  }

  Result<void> start_nodes() {
    if (!nodes_plan_) return {};
    if (!nodes_plan_->lanes.cards.empty()) {
      publish({.is_ok = false,
               .status = "registering the pool with RDMA cards",
               .pool_bytes = options_.pool_size_bytes,
               .done_bytes = options_.pool_size_bytes});
    }
    PEGA_TRY_LET(nodes_,
                 Nodes::start(io_, std::move(*nodes_plan_), *pool_, *service_, *background_, clock_,
                              ssd_ == nullptr ? nullptr : &ssd_->source(), *direct_, [this]() {
                                note_peers();
                                publish_ready();
                              }));
    watch_mailbox(fabric_news_, nodes_->completions(), [this]() { nodes_->read_completions(); });
    return {};
  }

  std::optional<NodesReport> report_nodes() const {
    if (nodes_ == nullptr) return std::nullopt;
    return nodes_->report();
  }

  std::optional<SsdReport> report_ssd() const {
    if (ssd_ == nullptr) return std::nullopt;
    SsdReport report = ssd_->report();
    report.fetches = ssd_fetches_->stats();
    return report;
  }

  std::optional<KeptReport> report_kept() const {
    if (keeping_ == nullptr) return std::nullopt;
    KeptReport report = keeping_->report();
    const CacheService::FormerReport former = service_->former();
    report.adopted_blocks = former.adopted_blocks;
    report.adopted_bytes = former.adopted_bytes;
    report.discarded_frames = former.discarded_frames;
    report.adopt_seconds = adopt_seconds_;
    report.former_clients = former.clients;
    report.waits_for_nodes = former.waits_for_nodes;
    return report;
  }

  void clean_disks(std::function<void(const SsdCleanupReport&)> done) {
    if (ssd_ == nullptr) return done({});
    ssd_->drop_all([done = std::move(done)](std::uint64_t blocks, bool is_durable) {
      done({.has_disks = true, .is_durable = is_durable, .dropped_blocks = blocks});
    });
  }

  void make_context() {
    local_fetches_ = std::make_unique<Fetches>(
        *service_, nullptr, *background_, io_.provider->getTimer(), clock_, Fetches::Options());
    Fetches& fetches = nodes_ != nullptr ? nodes_->fetches()
                       : ssd_ != nullptr ? *ssd_fetches_
                                         : *local_fetches_;
    prefetches_ = std::make_unique<Prefetches>(
        *service_, fetches, *background_, io_.provider->getTimer(), clock_,
        Prefetches::Options{.most_bytes = options_.prefetch_bytes != 0
                                              ? options_.prefetch_bytes
                                              : pool_->size_bytes() / kPrefetchPart});
    const Id128 incarnation = nodes_ == nullptr ? Id128::random() : nodes_->node();
    context_.reset(new SessionContext{.service = *service_,
                                      .background = *background_,
                                      .counters = counters_,
                                      .port = io_.unixEventPort,
                                      .timer = io_.provider->getTimer(),
                                      .clock = clock_,
                                      .pool_fd = pool_->fd(),
                                      .pool_bytes = pool_->size_bytes(),
                                      .fetches = fetches,
                                      .local_fetches = *local_fetches_,
                                      .direct = *direct_,
                                      .peers = nodes_ == nullptr ? nullptr : &nodes_->peers(),
                                      .watches = nodes_ == nullptr ? nullptr : &nodes_->watches(),
                                      .ssd = ssd_.get(),
                                      .keeping = keeping_.get(),
                                      .server = incarnation,
                                      .build = build(),
                                      .process_gone =
                                          [this](const Id128& connection) {
                                            tasks_.add(kj::evalLater([this, connection]() {
                                              service_->process_gone(connection);
                                              background_->poke();
                                            }));
                                          },
                                      .keys = {}});
  }

  void start_rpc(std::size_t connections) {
    RpcServer::Options rpc_options;
    rpc_options.max_connections = connections;
    rpc_options.hello_timeout = options_.hello_timeout;
    rpc_options.allowed_uids = allowed_uids_;
    rpc_ = std::make_unique<RpcServer>(io_, std::move(rpc_options), counters_);
    admin_ = std::make_unique<Admin>(
        *service_, *background_, io_.provider->getTimer(), clock_, counters_, *pool_,
        [this]() { return report_nodes(); }, [this]() { return report_ssd(); },
        [this]() { return report_kept(); }, [this](auto done) { clean_disks(std::move(done)); },
        *prefetches_, *direct_, context_->server, *http_, questions_);
    watch_mailbox(admin_news_, questions_, [this]() { admin_->read(); });
  }

  void log_ready() const {
    const std::string advice = huge_page_advice(*pool_);
    kLog.info("ready socket={} http={} pool={} pages={} huge={} eviction={} numa=\"{}\"{}",
              lock_.socket().string(), http_address_, format_bytes(pool_->size_bytes()),
              format_bytes(pool_->page_bytes()), format_bytes(pool_->huge_bytes()),
              to_string(eviction_), to_string(pool_->placement()),
              advice.empty() ? "" : fmt::format(" advice=\"{}\"", advice));
  }

  /// Writes the ready file, if one is configured.
  Result<void> announce_ready() const {
    if (options_.ready_file.empty()) return {};
    nlohmann::json ready = {{"socket", lock_.socket().string()},
                            {"http", http_address_},
                            {"http_socket", http_socket_},
                            {"pid", ::getpid()}};
    if (nodes_ != nullptr) ready["peer_listen"] = nodes_->report().listen;
    return write_ready_file(options_.ready_file, ready);
  }

  void taskFailed(kj::Exception&& exception) override {
    PEGA_ASSERT(false, "a task of the server failed: {}", error_from(exception).detail);
  }

  const ServerOptions& options_;
  std::vector<std::uint32_t> allowed_uids_;
  std::vector<std::chrono::seconds> windows_;
  engine::EvictionKind eviction_;
  engine::NumaPolicy numa_;
  PoolPreparation::Keep keep_;
  NumaTopology topology_ = NumaTopology::read();
  SteadyClock clock_;
  SocketLock lock_;
  std::optional<Nodes::Plan> nodes_plan_;
  kj::AsyncIoContext io_;
  RpcCounters counters_;
  std::string http_address_;
  std::string http_socket_;
  bool is_stopping_ = false;
  bool is_serving_ = false;
  std::optional<Error> failure_;

  Mailbox<AdminQuestion> questions_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<PoolPreparation> preparation_;
  std::unique_ptr<engine::Pool> pool_;
  std::unique_ptr<engine::KeptTables> tables_;  // Null: the pool ends with this server.
  std::unique_ptr<PoolKeeping> keeping_;        // The same.
  double adopt_seconds_ = 0;
  std::size_t former_clients_ = 0;  // As published.
  std::unique_ptr<CacheService> service_;
  std::unique_ptr<Background> background_;
  std::unique_ptr<SsdTier> ssd_;            // Reads into the pool.
  std::set<std::string> greeted_;           // Peers that have been connected.
  std::unique_ptr<Fetches> ssd_fetches_;    // With disks, without other nodes.
  std::unique_ptr<Fetches> local_fetches_;  // Without a source.
  std::unique_ptr<DirectReads> direct_;
  std::unique_ptr<Nodes> nodes_;  // Its lanes write into the pool.
  std::unique_ptr<Prefetches> prefetches_;
  std::unique_ptr<SessionContext> context_;
  std::unique_ptr<Admin> admin_;
  std::optional<Listener> listener_;
  std::unique_ptr<RpcServer> rpc_;  // Watches the listener.
  std::vector<std::shared_ptr<ProcessWatch>> former_watches_;
  kj::Own<kj::UnixEventPort::FdObserver> pool_news_;
  kj::Own<kj::UnixEventPort::FdObserver> admin_news_;
  kj::Own<kj::UnixEventPort::FdObserver> fabric_news_;
  kj::Own<kj::UnixEventPort::FdObserver> ssd_news_;
  kj::TaskSet tasks_;
};

}  // namespace

Result<void> run_server(const ServerOptions& options, const RuntimeDirectories& directories) {
  PEGA_TRY_LET(std::vector<std::uint32_t> uids, options.allowed_uids());
  PEGA_TRY_LET(std::vector<std::chrono::seconds> windows, options.window_lengths());
  // Reported now, not when the pool is ready.
  PEGA_TRY_LET(const engine::EvictionKind eviction, options.eviction_policy());
  PEGA_TRY_LET(const engine::NumaPolicy numa, options.numa_policy());
  PEGA_TRY_LET(const PoolPreparation::Keep keep, options.keep_mode());
  if (const auto checked = engine::Demand::check(windows); !checked) {
    return fail(checked.error().code, "--metric-hll-windows: {}", checked.error().detail);
  }
  std::string token;
  if (!options.http_token_file.empty()) {
    PEGA_TRY_LET(token, read_token(options.http_token_file));
  }
  PEGA_TRY_LET(RouterGuard routers, RouterGuard::create(options.peer_secret_file));
  PEGA_TRY_LET(const std::filesystem::path socket, socket_path(options.addr, directories));
  PEGA_TRY_LET(SocketLock lock, SocketLock::take(socket, options.socket_group));
  PEGA_TRY_LET(std::optional<Nodes::Plan> nodes, Nodes::plan(options, build()));
  PEGA_TRY_LET(TcpListener http, listen_tcp(options.http_addr, "--http-addr"));

  // Before any thread, so that all of them inherit the mask. A peer that closes its socket is an
  // error of write(), not a signal.
  kj::UnixEventPort::captureSignal(SIGTERM);
  kj::UnixEventPort::captureSignal(SIGINT);
  std::signal(SIGPIPE, SIG_IGN);

  Server server(options, std::move(uids), std::move(windows), eviction, numa, keep, std::move(lock),
                std::move(nodes));
  return server.run(std::move(http), std::move(token), std::move(routers));
}

Result<void> release_kept_pool(const ServerOptions& options,
                               const RuntimeDirectories& directories) {
  PEGA_TRY_LET(const std::filesystem::path socket, socket_path(options.addr, directories));
  const std::filesystem::path keeper = keeper_path(socket);
  PEGA_TRY_LET(const std::optional<KeeperState> released, release_keeper(keeper));
  if (!released) return fail(Errc::kRefused, "--release: no keeper listens at {}", keeper.string());
  fmt::print("released the pool of {} at {}\n", format_bytes(released->pool_bytes),
             keeper.string());
  return {};
}

}  // namespace pegaflow::server
