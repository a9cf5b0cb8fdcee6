#include "router/watch/health.h"

#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "router/http/log.h"
#include "router/upstream/engine_connections.h"
#include "router/upstream/upstream.h"
#include "router/watch/kv_watch.h"
#include "router/watch/load_watch.h"
#include "router/watch/model_watch.h"

namespace pegaflow::router {

namespace asio = boost::asio;

HealthChecks::HealthChecks(Shared& shared, const EngineList& list, RouterFiles files)
    : shared_(shared),
      timer_(shared.io),
      files_(std::move(files)),
      names_(
          shared.io, [this] { use_engines(); },
          [this](const std::string& sentence) {
            ++shared_.metrics.name_errors;
            if (!sentence.empty()) g_log.warn("a name could not be resolved: {}", sentence);
          }) {
  names_.set(list);
  shared_.fleet.set(names_.engines());
  tell_kv();
}

void HealthChecks::find_engines() {
  const TimePoint end = shared_.now() + shared_.options.health_timeout;
  names_.ask();
  while (names_.is_searching() && shared_.io.run_one_until(end) > 0) {
  }
  shared_.io.restart();
}

void HealthChecks::tell_kv() {
  if (shared_.kv != nullptr) {
    shared_.kv->fleet().set_engines(shared_.fleet.engines(), shared_.now());
    shared_.kv->pools().attach_engines();
  }
}

void HealthChecks::use_engines() {
  const std::vector<std::shared_ptr<Engine>> before = shared_.fleet.engines();
  shared_.fleet.set(names_.engines());
  tell_kv();
  shared_.line.serve_all(shared_.fleet, shared_.now());
  const auto& now = shared_.fleet.engines();
  g_log.info("engines changed engines={}", now.size());
  // A new engine is checked at once; it counts as up until then.
  for (const auto& engine : now) {
    if (std::find(before.begin(), before.end(), engine) == before.end()) {
      asio::co_spawn(shared_.io, check(engine), asio::detached);
    }
  }
}

void HealthChecks::stop() {
  stopped_ = true;
  timer_.cancel();
  names_.stop();
}

void HealthChecks::look_at_files() {
  // An invalid file changes nothing: a file that is being written must not stop the service.
  if (files_.engines.has_changed()) {
    Result<EngineList> list = shared_.options.engines();
    if (list) {
      names_.set(std::move(*list));
      use_engines();
    } else {
      ++shared_.metrics.engine_list_errors;
      g_log.error("the list of engines stays unchanged: {}", list.error().detail);
    }
  }
  if (files_.api_keys.has_changed()) {
    Result<std::optional<AccessList>> access = shared_.options.access();
    if (access) {
      (*access)->continue_from(*shared_.access);
      shared_.access = std::move(*access);
      g_log.info("API keys were read again keys={}", shared_.access->size());
    } else {
      ++shared_.metrics.key_file_errors;
      g_log.error("the API keys stay unchanged: {}", access.error().detail);
    }
  }
  if (files_.engine_key.has_changed()) {
    Result<std::string> key = shared_.options.engine_key();
    if (key) {
      shared_.engine_key = std::move(*key);
      g_log.info("the engines' API key was read again");
    } else {
      ++shared_.metrics.key_file_errors;
      g_log.error("the engines' API key stays unchanged: {}", key.error().detail);
    }
  }
  if (files_.secrets.has_changed()) {
    Result<std::optional<cluster::PeerSecrets>> secrets = shared_.options.secrets();
    if (secrets) {
      shared_.secrets = std::move(*secrets);
      g_log.info("the secrets of servers and routers were read again");
    } else {
      ++shared_.metrics.key_file_errors;
      g_log.error("the secrets of servers and routers stay unchanged: {}", secrets.error().detail);
    }
  }
  if (files_.salt_key.has_changed()) {
    Result<std::optional<CacheSalts>> salts = shared_.options.cache_salts();
    if (salts) {
      shared_.salts = *salts;
      g_log.warn(
          "the key of cache salts has changed: blocks cached by tenants before are no longer "
          "found");
    } else {
      ++shared_.metrics.key_file_errors;
      g_log.error("the key of cache salts stays unchanged: {}", salts.error().detail);
    }
  }
}

void HealthChecks::note(Engine& engine, bool is_good, const std::string& why) {
  if (is_good) {
    engine.failed_checks = 0;
    if (engine.is_up) return;
    engine.is_up = true;
    engine.breaker.succeeded();      // Failures before the restart do not count.
    engine.models.asked_at.reset();  // It may have restarted with another model.
    engine.early.restarted();
    if (shared_.kv != nullptr) shared_.kv->fleet().ask_again(engine.id);
    g_log.info("engine is up role={} engine={}", to_string(engine.role), engine.url.text);
    shared_.line.serve_all(shared_.fleet, shared_.now());
    return;
  }
  ++engine.counters.checks_failed;
  ++engine.failed_checks;
  if (!engine.is_up ||
      engine.failed_checks < static_cast<std::size_t>(shared_.options.health_failures)) {
    return;
  }
  engine.is_up = false;
  engine.early.forget();
  g_log.warn("engine is down role={} engine={} why=\"{}\"", to_string(engine.role), engine.url.text,
             why);
  // The decode engines prefill the prompts of this engine.
  if (engine.role == Role::kPrefill) shared_.engine_connections.give_up(engine);
  shared_.line.serve_all(shared_.fleet,
                         shared_.now());  // Requests that wait for the last engine are refused.
}

asio::awaitable<void> HealthChecks::check(std::shared_ptr<Engine> engine) {
  asio::steady_timer timer(shared_.io);
  const Result<void> resolved =
      co_await shared_.engine_connections.resolve(engine, timer, shared_.options.health_timeout);
  std::string request = get_head(*engine, "/health");
  const Result<ShortResponse> got =
      co_await get_from_engine(shared_.engine_connections, engine, std::move(request),
                               shared_.options.health_timeout, std::size_t{64} * 1024);
  --engine->counters.requests;  // Counts requests of clients only.
  if (stopped_ || engine->is_removed) co_return;
  if (!got) {
    note(*engine, false, resolved ? got.error().detail : resolved.error().detail);
  } else {
    note(*engine, got->status == 200, fmt::format("status {}", got->status));
    if (got->status == 200) {
      refresh_model_list(shared_, engine, shared_.options.models_interval);
      refresh_event_sources(shared_, engine);
      refresh_engine_load(shared_, engine);
    }
  }
}

asio::awaitable<void> HealthChecks::run() {
  while (!stopped_) {
    look_at_files();
    names_.ask();
    for (const auto& engine : shared_.fleet.engines()) {
      asio::co_spawn(shared_.io, check(engine), asio::detached);
    }
    shared_.engine_connections.sweep(shared_.fleet.engines());
    // Jitter spreads the checks of routers that started together.
    std::uniform_real_distribution<double> jitter(0.9, 1.1);
    const std::chrono::duration<double> pause =
        std::chrono::duration<double>(shared_.options.health_interval) * jitter(shared_.random);
    boost::system::error_code ignored;
    timer_.expires_after(std::chrono::duration_cast<Duration>(pause));
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

}  // namespace pegaflow::router
