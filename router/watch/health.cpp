#include "router/watch/health.h"

#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "base/log.h"
#include "router/watch/model_watch.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

constexpr Log kLog{"router"};

}  // namespace

HealthChecks::HealthChecks(Shared& shared, const EngineList& list, RouterFiles files)
    : shared_(shared),
      timer_(shared.io),
      files_(std::move(files)),
      names_(
          shared.io, [this] { use_engines(); },
          [this](const std::string& sentence) {
            ++shared_.metrics.name_errors;
            if (!sentence.empty()) kLog.warn("a name is not known now: {}", sentence);
          }) {
  names_.set(list);
  shared_.fleet.set(names_.engines());
}

void HealthChecks::find_engines() {
  const TimePoint end = shared_.now() + shared_.options.health_timeout;
  names_.ask();
  while (names_.is_searching() && shared_.io.run_one_until(end) > 0) {
  }
  shared_.io.restart();
}

void HealthChecks::use_engines() {
  const std::vector<std::shared_ptr<Engine>> before = shared_.fleet.engines();
  shared_.fleet.set(names_.engines());
  shared_.line.serve_all(shared_.fleet);
  const auto& now = shared_.fleet.engines();
  kLog.info("engines changed engines={}", now.size());
  // A new one is asked at once whether it is there; it is taken to be until it has answered.
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
  // What cannot be used changes nothing: a file that is being written must not stop the service.
  if (files_.engines.has_changed()) {
    Result<EngineList> list = shared_.options.engines();
    if (list) {
      names_.set(std::move(*list));
      use_engines();
    } else {
      ++shared_.metrics.engine_list_errors;
      kLog.error("the engines stay as they were: {}", list.error().detail);
    }
  }
  if (files_.api_keys.has_changed()) {
    Result<std::optional<AccessList>> access = shared_.options.access();
    if (access) {
      (*access)->continue_from(*shared_.access);
      shared_.access = std::move(*access);
      kLog.info("API keys read again keys={}", shared_.access->size());
    } else {
      ++shared_.metrics.key_file_errors;
      kLog.error("the API keys stay as they were: {}", access.error().detail);
    }
  }
  if (files_.engine_key.has_changed()) {
    Result<std::string> key = shared_.options.engine_key();
    if (key) {
      shared_.engine_key = std::move(*key);
      kLog.info("the engines' API key was read again");
    } else {
      ++shared_.metrics.key_file_errors;
      kLog.error("the engines' API key stays as it was: {}", key.error().detail);
    }
  }
  if (files_.salt_key.has_changed()) {
    Result<std::optional<CacheSalts>> salts = shared_.options.cache_salts();
    if (salts) {
      shared_.salts = *salts;
      kLog.warn("the key of cache salts has changed: what tenants have cached is not found again");
    } else {
      ++shared_.metrics.key_file_errors;
      kLog.error("the key of cache salts stays as it was: {}", salts.error().detail);
    }
  }
}

void HealthChecks::note(Engine& engine, bool is_good, const std::string& why) {
  if (is_good) {
    engine.failed_checks = 0;
    if (engine.is_up) return;
    engine.is_up = true;
    engine.breaker.succeeded();      // What failed before it was down says nothing about it now.
    engine.models.asked_at.reset();  // It may have been started with another model.
    kLog.info("engine is up role={} engine={}", to_string(engine.role), engine.url.text);
    shared_.line.serve_all(shared_.fleet);
    return;
  }
  ++engine.counters.checks_failed;
  ++engine.failed_checks;
  if (!engine.is_up ||
      engine.failed_checks < static_cast<std::size_t>(shared_.options.health_failures)) {
    return;
  }
  engine.is_up = false;
  kLog.warn("engine is down role={} engine={} why=\"{}\"", to_string(engine.role), engine.url.text,
            why);
  // The decode engine prefills what this one had.
  if (engine.role == Role::kPrefill) shared_.engine_connections.give_up(engine);
  shared_.line.serve_all(shared_.fleet);  // Who waits for the last engine is refused.
}

asio::awaitable<void> HealthChecks::check(std::shared_ptr<Engine> engine) {
  asio::steady_timer timer(shared_.io);
  const Result<void> resolved =
      co_await shared_.engine_connections.resolve(engine, timer, shared_.options.health_timeout);
  std::string request = fmt::format("GET /health HTTP/1.1\r\nHost: {}\r\n\r\n",
                                    std::string_view(engine->url.text).substr(7));
  const Result<ShortAnswer> got =
      co_await get_from_engine(shared_.engine_connections, engine, std::move(request),
                               shared_.options.health_timeout, std::size_t{64} * 1024);
  --engine->counters.requests;  // It is none of a client.
  if (stopped_ || engine->is_removed) co_return;
  if (!got) {
    note(*engine, false, resolved ? got.error().detail : resolved.error().detail);
  } else {
    note(*engine, got->status == 200, fmt::format("it answered {}", got->status));
    if (got->status == 200) {
      refresh_model_list(shared_, engine, shared_.options.models_interval);
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
    // Routers that started together do not ask together for long.
    std::uniform_real_distribution<double> jitter(0.9, 1.1);
    const std::chrono::duration<double> pause =
        std::chrono::duration<double>(shared_.options.health_interval) * jitter(shared_.random);
    boost::system::error_code ignored;
    timer_.expires_after(std::chrono::duration_cast<Duration>(pause));
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

}  // namespace pegaflow::router
