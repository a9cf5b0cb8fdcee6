#include "router/upstream/engine_connections.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <sys/socket.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "router/http/http_error.h"

namespace pegaflow::router {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

bool is_open_and_quiet(tcp::socket& socket) {
  char byte = 0;
  const ssize_t got = ::recv(socket.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

}  // namespace

EngineConnections::EngineConnections(asio::io_context& io, Deadlines& deadlines,
                                     const Options& options)
    : io_(io), deadlines_(deadlines), options_(options) {}

std::unique_ptr<EngineSocket> EngineConnections::take(const Engine& engine) {
  const auto found = idle_.find(engine.url.text);
  if (found == idle_.end()) return nullptr;
  const TimePoint oldest = std::chrono::steady_clock::now() - options_.idle_time;
  while (!found->second.empty()) {
    Idle last = std::move(found->second.back());
    found->second.pop_back();
    if (last.since >= oldest && is_open_and_quiet(*last.socket)) return std::move(last.socket);
  }
  return nullptr;
}

void EngineConnections::give_back(const Engine& engine, std::unique_ptr<EngineSocket> socket) {
  if (engine.is_removed || options_.idle_time <= Duration::zero()) return;
  std::vector<Idle>& kept = idle_[engine.url.text];
  if (kept.size() < options_.idle_limit) {
    kept.push_back({std::move(socket), std::chrono::steady_clock::now()});
  }
}

void EngineConnections::sweep(const std::vector<std::shared_ptr<Engine>>& engines) {
  const TimePoint oldest = std::chrono::steady_clock::now() - options_.idle_time;
  const auto is_listed = [&](const std::string& url) {
    return std::any_of(engines.begin(), engines.end(),
                       [&](const auto& engine) { return engine->url.text == url; });
  };
  for (auto entry = idle_.begin(); entry != idle_.end();) {
    std::erase_if(entry->second, [&](const Idle& each) { return each.since < oldest; });
    const bool goes = entry->second.empty() || !is_listed(entry->first);
    entry = goes ? idle_.erase(entry) : std::next(entry);
  }
  std::erase_if(known_, [&](const auto& entry) { return !is_listed(entry.first); });
}

bool EngineConnections::add(PendingCall& call) {
  calls_.insert(&call);
  return !is_closed_;
}

void EngineConnections::remove(PendingCall& call) { calls_.erase(&call); }

void EngineConnections::give_up(const Engine& engine) {
  for (PendingCall* const call : calls_) {
    if (&call->callee() == &engine) call->give_up();
  }
  idle_.erase(engine.url.text);
}

void EngineConnections::close_all() {
  is_closed_ = true;
  for (PendingCall* const call : calls_) call->cancel();
  for (const auto& [url, lookup] : lookups_) {
    lookup->resolver.cancel();
    for (asio::steady_timer* const timer : lookup->waiting) timer->cancel();
  }
  idle_.clear();
}

asio::awaitable<void> EngineConnections::look_up(std::shared_ptr<Engine> engine,
                                                 std::shared_ptr<Lookup> lookup) {
  error_code ec;
  const tcp::resolver::results_type found = co_await lookup->resolver.async_resolve(
      engine->url.host, engine->url.port, asio::redirect_error(asio::use_awaitable, ec));
  if (ec) {
    lookup->result = fail_socket(ec, "resolve " + engine->url.host);
  } else {
    known_[engine->url.text].endpoints.assign(found.begin(), found.end());
    lookup->result.emplace();
  }
  lookups_.erase(engine->url.text);
  for (asio::steady_timer* const timer : lookup->waiting) timer->cancel();
}

asio::awaitable<Result<void>> EngineConnections::resolve(std::shared_ptr<Engine> engine,
                                                         asio::steady_timer& timer,
                                                         Duration limit) {
  error_code ec;
  asio::ip::make_address(engine->url.host, ec);
  if (!ec || is_closed_) co_return Result<void>();
  std::shared_ptr<Lookup> lookup = lookups_[engine->url.text];
  const bool is_first = lookup == nullptr;
  if (is_first) lookup = lookups_[engine->url.text] = std::make_shared<Lookup>(io_);
  timer.expires_after(limit);
  lookup->waiting.push_back(&timer);
  if (is_first) asio::co_spawn(io_, look_up(engine, lookup), asio::detached);
  co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ec));
  std::erase(lookup->waiting, &timer);
  if (lookup->result) co_return *lookup->result;
  co_return Result<void>(fail(Errc::kTimeout, "resolve {}: no result in time", engine->url.host));
}

std::vector<tcp::endpoint> EngineConnections::endpoints(const Engine& engine) {
  error_code ec;
  const auto address = asio::ip::make_address(engine.url.host, ec);
  if (!ec) return {tcp::endpoint(address, static_cast<std::uint16_t>(std::stoi(engine.url.port)))};
  Known& known = known_[engine.url.text];
  std::vector<tcp::endpoint> all = known.endpoints;
  if (!all.empty()) {
    std::rotate(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(known.next++ % all.size()),
                all.end());
  }
  return all;
}

}  // namespace pegaflow::router
