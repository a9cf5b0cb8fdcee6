#include "router/router.h"

#include <array>
#include <csignal>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "router/client_connection.h"
#include "router/config/event_endpoints.h"
#include "router/http/cors.h"
#include "router/http/http_error.h"
#include "router/http/log.h"
#include "router/kv/kv_policy.h"
#include "router/page/pages.h"
#include "router/score/renderers.h"
#include "router/state/shared.h"
#include "router/upstream/engine_connections.h"
#include "router/upstream/prefetches.h"
#include "router/watch/health.h"
#include "router/watch/kv_watch.h"
#include "router/watch/pool_watch.h"
#include "router/watch/replica_watch.h"
#include "router/watch/server_watch.h"

namespace pegaflow::router {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

/// Limit of refused connections that wait for their clients: each has a descriptor for up to a
/// second.
constexpr std::size_t kTurnedAway = 256;

/// A stream needs two descriptors, so 20,000 connections exceed the usual limit of 1,024.
void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    g_log.warn("the limit of open files could not be raised limit={}", limit.rlim_cur);
  }
}

Result<tcp::endpoint> endpoint_of(asio::io_context& io, std::string_view option,
                                  const std::string& listen) {
  const std::size_t colon = listen.rfind(':');
  if (colon == std::string::npos) {
    return fail(Errc::kInvalidArgument, "{}: '{}' is not HOST:PORT", option, listen);
  }
  std::string host = listen.substr(0, colon);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  error_code ec;
  const auto found = tcp::resolver(io).resolve(host, listen.substr(colon + 1), ec);
  if (ec || found.empty()) {
    return fail(Errc::kInvalidArgument, "{}: {}: {}", option, listen, ec.message());
  }
  return found.begin()->endpoint();
}

std::string shown(const tcp::endpoint& bound) {
  return fmt::format(fmt::runtime(bound.address().is_v6() ? "[{}]:{}" : "{}:{}"),
                     bound.address().to_string(), bound.port());
}

/// Accepts connections, and shuts down in order.
class Service {
 public:
  /// `kv` is nullptr when no policy is kv-aware.
  Service(Shared& shared, const EngineList& list, const std::vector<EngineUrl>& servers,
          RouterFiles files, KvParts* kv)
      : shared_(shared),
        health_(shared, list, std::move(files)),
        servers_(shared, servers),
        acceptor_(shared.io),
        own_acceptor_(shared.io),
        signals_(shared.io, SIGTERM, SIGINT),
        last_moment_(shared.io) {
    if (kv == nullptr) return;
    kv_.emplace(shared, *kv);
    if (shared.secrets && !servers.empty()) pools_.emplace(shared, servers);
  }

  Result<void> listen() {
    PEGA_TRY_LET(const std::string place,
                 open(acceptor_, "--listen", shared_.options.listen, shared_.options.reuse_port));
    std::string own;
    if (!shared_.options.own_listen.empty()) {
      PEGA_TRY_LET(own, open(own_acceptor_, "--own-listen", shared_.options.own_listen, false));
    }
    health_.find_engines();
    PEGA_TRY(open_replicas());
    // Before the log line: a process that waits for either finds both.
    PEGA_TRY(write_ready_file(place, own));
    g_log.info("ready listen={}{}{} engines={}", place, own.empty() ? "" : " own=", own,
               shared_.fleet.engines().size());
    return {};
  }

  void start() {
    asio::co_spawn(shared_.io, health_.run(), asio::detached);
    asio::co_spawn(shared_.io, servers_.run(), asio::detached);
    asio::co_spawn(shared_.io, accept(acceptor_), asio::detached);
    if (own_acceptor_.is_open()) {
      asio::co_spawn(shared_.io, accept(own_acceptor_), asio::detached);
    }
    if (kv_) kv_->start();
    if (pools_) asio::co_spawn(shared_.io, pools_->run(), asio::detached);
    if (replicas_) {
      error_code ec;
      const tcp::acceptor& own = own_acceptor_.is_open() ? own_acceptor_ : acceptor_;
      replicas_->start(own.local_endpoint(ec).port());
    }
    wait_for_signal();
  }

 private:
  Result<void> open_replicas() {
    PEGA_TRY_LET(const auto urls, shared_.options.replica_urls());
    if (urls.empty()) return {};
    PEGA_TRY_LET(replicas_, ReplicaWatch::open(shared_));
    return {};
  }

  /// Listens, and returns the bound address.
  Result<std::string> open(tcp::acceptor& acceptor, std::string_view option,
                           const std::string& listen, bool reuse_port) {
    PEGA_TRY_LET(const tcp::endpoint place, endpoint_of(shared_.io, option, listen));
    error_code ec;
    acceptor.open(place.protocol(), ec);
    if (!ec) acceptor.set_option(tcp::acceptor::reuse_address(true), ec);
    const int on = 1;
    if (!ec && reuse_port &&
        ::setsockopt(acceptor.native_handle(), SOL_SOCKET, SO_REUSEPORT, &on, sizeof(on)) != 0) {
      return fail_errno(errno, "--reuse-port at " + listen);
    }
    if (!ec) acceptor.bind(place, ec);
    if (!ec) acceptor.listen(4096, ec);
    if (!ec) acceptor.non_blocking(true, ec);
    if (ec) return fail_socket(ec, "listen on " + listen);
    return shown(acceptor.local_endpoint(ec));
  }

  /// The first signal begins --drain-delay; without a delay, or at the second signal, the drain
  /// begins.
  void wait_for_signal() {
    signals_.async_wait([this](const error_code& ec, int number) {
      if (ec) return;
      if (shared_.is_leaving || shared_.options.drain_delay <= Duration::zero()) {
        drain(number);
        return;
      }
      g_log.info("leaving signal={} requests={}", number, shared_.metrics.in_flight);
      shared_.is_leaving = true;
      last_moment_.expires_after(shared_.options.drain_delay);
      last_moment_.async_wait([this, number](const error_code& why) {
        if (!why) drain(number);
      });
      wait_for_signal();
    });
  }

  Result<void> write_ready_file(const std::string& listen, const std::string& own) const {
    if (shared_.options.ready_file.empty()) return {};
    // Written under another name first, so that a reader never sees an incomplete file.
    const std::string temporary = shared_.options.ready_file + ".new";
    {
      std::ofstream file(temporary);
      file << fmt::format(
          "{{\"listen\":{},{}{}\"pid\":{}}}\n", json_quote(listen),
          own.empty() ? "" : fmt::format("\"own_listen\":{},", json_quote(own)),
          replicas_ ? fmt::format("\"replica_listen\":{},", json_quote(replicas_->address())) : "",
          ::getpid());
      if (!file.flush()) return fail(Errc::kIo, "--ready-file: {} cannot be written", temporary);
    }
    if (::rename(temporary.c_str(), shared_.options.ready_file.c_str()) != 0) {
      return fail_errno(errno, "rename " + temporary);
    }
    return {};
  }

  asio::awaitable<void> accept(tcp::acceptor& acceptor) {
    asio::steady_timer pause(shared_.io);
    while (acceptor.is_open()) {
      error_code ec;
      tcp::socket socket(shared_.io);
      co_await acceptor.async_accept(socket, asio::redirect_error(asio::use_awaitable, ec));
      if (!ec) {
        begin(std::move(socket));  // Includes a connection accepted just before drain().
      } else if (acceptor.is_open()) {
        // Usually no descriptor is free: connections in the backlog wait until one is.
        g_log.warn("a connection could not be accepted: {}", ec.message());
        pause.expires_after(std::chrono::milliseconds(50));
        co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, ec));
      }
    }
  }

  /// Closing at once would reset a connection whose request has arrived, and lose the response.
  asio::awaitable<void> turn_away(tcp::socket socket, std::string answer) {
    error_code ec;
    Deadline deadline(shared_.deadlines, [&] {
      error_code ignored;
      socket.close(ignored);
    });
    socket.non_blocking(true, ec);
    socket.write_some(asio::buffer(answer), ec);  // Fits into the empty buffer of a new socket.
    socket.shutdown(tcp::socket::shutdown_send, ec);
    if (turned_away_ >= kTurnedAway) co_return;
    ++turned_away_;
    deadline.set(std::chrono::seconds(1));
    std::array<char, 4096> thrown_away;
    while (!ec) {
      co_await socket.async_wait(tcp::socket::wait_read,
                                 asio::redirect_error(asio::use_awaitable, ec));
      if (!ec) socket.read_some(asio::buffer(thrown_away), ec);
      if (ec == asio::error::would_block) ec.clear();
    }
    --turned_away_;
  }

  [[nodiscard]] std::string turned_away_fields() const {
    return "Retry-After: 1\r\n" + cors_lines_without_head(shared_.options.cors_origins);
  }

  void begin(tcp::socket socket) {
    if (shared_.metrics.connections >=
        static_cast<std::uint64_t>(shared_.options.max_connections)) {
      ++shared_.metrics.connections_refused;
      const std::string answer =
          error_response(503, "too many connections", false, turned_away_fields(), false);
      asio::co_spawn(shared_.io, turn_away(std::move(socket), answer), asio::detached);
      return;
    }
    const auto limit = static_cast<std::size_t>(shared_.options.max_connections_per_address);
    const std::string address = limit > 0 ? address_of(socket) : std::string();
    if (limit > 0 && addresses_[address] >= limit) {
      ++shared_.metrics.address_refused;
      const std::string answer = error_response(429, "too many connections from this address",
                                                false, turned_away_fields(), false);
      asio::co_spawn(shared_.io, turn_away(std::move(socket), answer), asio::detached);
      return;
    }
    if (limit > 0) ++addresses_[address];
    const auto connection = std::make_shared<ClientConnection>(std::move(socket), shared_);
    connections_.insert(connection);
    asio::co_spawn(shared_.io, connection->run(),
                   [this, connection, address](const std::exception_ptr& problem) {
                     if (problem) {
                       try {
                         std::rethrow_exception(problem);
                       } catch (const std::exception& error) {
                         g_log.error("an exception ended a connection: {}", error.what());
                       }
                       connection->abort();  // Other references may exist.
                     }
                     connections_.erase(connection);
                     const auto counted = addresses_.find(address);
                     if (counted != addresses_.end() && --counted->second == 0) {
                       addresses_.erase(counted);
                     }
                     if (shared_.is_draining) end_if_done();
                   });
  }

  void drain(int number) {
    if (shared_.is_draining) return;
    shared_.is_leaving = shared_.is_draining = true;
    for (const auto& each : connections_) each->drain();
    // Connections in the backlog are served: the kernel would reset them otherwise.
    for (tcp::acceptor* const acceptor : {&acceptor_, &own_acceptor_}) {
      if (!acceptor->is_open()) continue;
      error_code ec;
      while (!ec) {
        tcp::socket socket(shared_.io);
        acceptor->accept(socket, ec);
        if (!ec) begin(std::move(socket));
      }
      acceptor->close(ec);
    }
    // Connections are refused from here on.
    g_log.info("draining signal={} requests={}", number, shared_.metrics.in_flight);
    last_moment_.expires_after(shared_.options.shutdown_timeout);
    last_moment_.async_wait([this](const error_code& why) {
      if (why) return;
      g_log.warn("requests are aborted after --shutdown-timeout requests={}",
                 shared_.metrics.in_flight);
      for (const auto& each : connections_) each->abort();
      // Calls without a client: health checks, and polls of all engines.
      health_.stop();
      servers_.stop();
      shared_.engine_connections.close_all();
    });
    // After the connections that accept() is about to begin.
    asio::post(shared_.io, [this] { end_if_done(); });
  }

  /// Cancels all operations that would keep run() from returning.
  void end_if_done() {
    if (!connections_.empty()) return;
    health_.stop();
    servers_.stop();
    if (kv_) kv_->stop();
    if (pools_) pools_->stop();
    if (replicas_) replicas_->stop();
    last_moment_.cancel();
    signals_.cancel();
    shared_.engine_connections.close_all();
  }

  Shared& shared_;
  HealthChecks health_;
  ServerWatch servers_;
  std::optional<KvWatch> kv_;
  std::optional<PoolWatch> pools_;
  std::unique_ptr<ReplicaWatch> replicas_;
  tcp::acceptor acceptor_;
  tcp::acceptor own_acceptor_;
  asio::signal_set signals_;
  asio::steady_timer last_moment_;
  std::size_t turned_away_ = 0;  // Refused connections that wait for their clients to read.
  std::unordered_set<std::shared_ptr<ClientConnection>> connections_;
  std::unordered_map<std::string, std::size_t>
      addresses_;  // Open connections by address; empty without a limit.
};

Fleet::Options fleet_options(const RouterOptions& options) {
  Fleet::Options fleet;
  fleet.breaker.failures = options.breaker_failures;
  fleet.breaker.open_time = options.breaker_time;
  fleet.max_inflight = {static_cast<std::size_t>(options.max_prefill_inflight),
                        static_cast<std::size_t>(options.max_decode_inflight)};
  fleet.passes_unknown_models = options.pass_unknown_models;
  return fleet;
}

/// The policy of an option; kv-aware uses `kv`, which outlives it.
Result<std::unique_ptr<Policy>> policy_of(const std::string& name, Role role, std::uint64_t seed,
                                          KvParts* kv, Duration queue_time, const Clock& clock) {
  if (kv == nullptr || name != kKvAware) return make_policy(name, seed);
  PEGA_TRY_LET(auto fallback, make_policy(kKvFallback, seed));
  return std::make_unique<KvAware>(*kv->routing, role, clock, queue_time, std::string(kKvFallback),
                                   std::move(fallback));
}

/// `value`; an error is prefixed with the option.
template <typename T>
Result<T> of_option(std::string_view option, Result<T> value) {
  if (!value) value.error().detail = fmt::format("{}: {}", option, value.error().detail);
  return value;
}

/// Warns of options without effect.
void warn_of_options(const RouterOptions& options, Flow flow, const EventEndpoints& endpoints,
                     const EngineList& list) {
  for (const std::string& engine : endpoints.unlisted(list)) {
    g_log.warn("--kv-events names an engine that --engines-file does not list now engine={}",
               engine);
  }
  if (!options.pd_first_token || uses_store(flow)) return;
  g_log.warn(
      "--pd-first-token has no effect with --flow {}: its parameters cover the prompt without "
      "the first token",
      options.flow);
}

/// The parts of the policy kv-aware; none when no role uses it.
Result<std::optional<KvParts>> kv_parts_of(const RouterOptions& options, std::uint64_t seed) {
  PEGA_TRY_LET(const auto server_of_engines, options.server_of_engines());
  if (options.prefill_policy != kKvAware && options.decode_policy != kKvAware) return std::nullopt;
  PEGA_TRY_LET(KvParts parts, KvParts::create(options, seed));
  for (const auto& [engine, server] : server_of_engines) {
    parts.routing->pools().assign(engine, server);
  }
  return std::optional(std::move(parts));
}

Result<std::array<std::unique_ptr<Policy>, kRoleCount>> policies_of(const RouterOptions& options,
                                                                    std::uint64_t seed, KvParts* kv,
                                                                    const Clock& clock) {
  std::array<std::unique_ptr<Policy>, kRoleCount> policies;
  PEGA_TRY_LET(policies[0],
               of_option("--prefill-policy", policy_of(options.prefill_policy, Role::kPrefill, seed,
                                                       kv, Duration::zero(), clock)));
  PEGA_TRY_LET(policies[1], of_option("--decode-policy",
                                      policy_of(options.decode_policy, Role::kDecode, seed + 1, kv,
                                                options.engine_queue_time, clock)));
  return policies;
}

/// Sets the parts of the policy kv-aware, if there are any. The result outlives `shared`.
std::unique_ptr<Prefetches> use_policy(Shared& shared, KvParts* kv, std::uint64_t seed) {
  if (kv == nullptr) return nullptr;
  shared.kv = kv->routing.get();
  auto prefetches = std::make_unique<Prefetches>(shared.engine_connections, shared.secrets,
                                                 *kv->routing, Prefetches::Options{.seed = seed});
  shared.prefetches = prefetches.get();
  return prefetches;
}

}  // namespace

Result<void> run_router(const RouterOptions& options) {
  RouterFiles files(options);
  PEGA_TRY_LET(const EngineList list, options.engines());
  PEGA_TRY_LET(const std::vector<EngineUrl> servers, options.server_urls());
  PEGA_TRY_LET(const std::vector<EngineUrl> renderer_urls, options.render_urls());
  PEGA_TRY_LET(const EventEndpoints event_endpoints, options.event_endpoints(list));
  PEGA_TRY(options.check_passed());
  PEGA_TRY(options.check_cors_origins());
  PEGA_TRY_LET(const Flow flow, of_option("--flow", parse_flow(options.flow)));
  std::random_device device;
  const std::uint64_t seed = (std::uint64_t{device()} << 32U) | device();
  const SteadyClock clock;
  PEGA_TRY_LET(std::optional<KvParts> kv_parts, kv_parts_of(options, seed + 3));
  KvParts* const kv = kv_parts ? &*kv_parts : nullptr;
  PEGA_TRY_LET(auto policies, policies_of(options, seed, kv, clock));
  raise_descriptor_limit();
  warn_of_options(options, flow, event_endpoints, list);
  Fleet fleet(fleet_options(options), std::move(policies), clock);

  // run() returns when no operation is pending, so no coroutine outlives the objects that it uses.
  asio::io_context io(1);
  asio::steady_timer next_deadline(io);
  Deadlines deadlines(clock, [&](TimePoint when) {
    if (when == TimePoint::max()) {
      next_deadline.cancel();
      return;
    }
    next_deadline.expires_at(when);
    next_deadline.async_wait([&](const error_code& ec) {
      if (!ec) deadlines.run();
    });
  });
  EngineConnections engine_connections(
      io, deadlines,
      {.connect_timeout = options.connect_timeout, .idle_time = options.engine_idle_time});
  Shared shared{.io = io,
                .options = options,
                .flow = flow,
                .fleet = fleet,
                .engine_connections = engine_connections,
                .deadlines = deadlines,
                .random = std::mt19937_64(seed + 2)};
  PEGA_TRY_LET(shared.secrets, options.secrets());
  const std::unique_ptr<Prefetches> prefetches = use_policy(shared, kv, seed + 4);
  shared.event_endpoints = &event_endpoints;
  PEGA_TRY_LET(shared.access, options.access());
  PEGA_TRY_LET(shared.engine_key, options.engine_key());
  PEGA_TRY_LET(shared.salts, options.cache_salts());
  Renderers renderers(engine_connections, renderer_urls, shared.engine_key,
                      {.timeout = options.render_timeout,
                       .inflight = static_cast<std::size_t>(options.render_inflight)});
  if (!renderer_urls.empty()) shared.renderers = &renderers;
  Service service(shared, list, servers, std::move(files), kv);
  PEGA_TRY(service.listen());
  service.start();
  io.run();
  g_log.info("stopped");
  return {};
}

}  // namespace pegaflow::router
