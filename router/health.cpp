#include "router/health.h"

#include <utility>

#include <sys/stat.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "base/log.h"

namespace pegaflow {

namespace asio = boost::asio;

namespace {

constexpr Log kLog{"router"};

/// What of a file changes with its content, also when it is replaced within one second.
std::string stamp_of(const std::string& path) {
  struct stat info {};
  if (path.empty() || ::stat(path.c_str(), &info) != 0) return {};
  return fmt::format("{} {} {} {}", info.st_ino, info.st_size, info.st_mtim.tv_sec,
                     info.st_mtim.tv_nsec);
}

}  // namespace

HealthChecks::HealthChecks(Shared& shared)
    : shared_(shared), timer_(shared.io), file_stamp_(stamp_of(shared.options.engines_file)) {}

void HealthChecks::stop() {
  stopped_ = true;
  timer_.cancel();
}

void HealthChecks::look_at_file() {
  const std::string& path = shared_.options.engines_file;
  const std::string stamp = stamp_of(path);
  if (stamp == file_stamp_) return;
  file_stamp_ = stamp;
  const Result<EngineList> list = shared_.options.engines();
  if (!list) {
    // What was there stays: a file that is being written must not stop the service.
    ++shared_.metrics.engine_list_errors;
    kLog.error("the engines stay as they were: {}", list.error().detail);
    return;
  }
  shared_.fleet.set(*list);
  shared_.line.call_all();
  kLog.info("engines read again engines={}", shared_.fleet.engines().size());
}

void HealthChecks::note(Engine& engine, bool is_good, const std::string& why) {
  if (is_good) {
    engine.failed_checks = 0;
    if (engine.is_up) return;
    engine.is_up = true;
    engine.breaker.succeeded();  // What failed before it was down says nothing about it now.
    kLog.info("engine is up role={} engine={}", to_string(engine.role), engine.url.text);
    shared_.line.call_all();
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
  shared_.line.call_all();  // Who waits for the last engine is told so.
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
  }
}

asio::awaitable<void> HealthChecks::run() {
  while (!stopped_) {
    look_at_file();
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

}  // namespace pegaflow
