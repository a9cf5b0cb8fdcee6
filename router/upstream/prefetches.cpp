#include "router/upstream/prefetches.h"

#include <ctime>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <fmt/format.h>

#include "router/http/log.h"
#include "router/kv/kv_routing.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

constexpr std::size_t kServers = 1024;
/// The answers have no content; those of errors a sentence.
constexpr std::size_t kAnswerBytes = 4096;
constexpr unsigned kAccepted = 202;

}  // namespace

Prefetches::Prefetches(EngineConnections& connections,
                       const std::optional<cluster::PeerSecrets>& secrets, KvRouting& routing,
                       const Options& options)
    : connections_(connections), secrets_(secrets), routing_(routing), options_(options) {}

std::shared_ptr<Prefetches::Server> Prefetches::server_of(const std::string& url) {
  const auto found = servers_.find(url);
  if (found != servers_.end()) return found->second;
  if (servers_.size() >= kServers) {
    // Servers of dns:// names come and go.
    std::erase_if(servers_, [](const auto& each) { return each.second->in_flight == 0; });
    if (servers_.size() >= kServers) return nullptr;
  }
  const auto parsed = EngineUrl::parse(url);
  if (!parsed) return nullptr;
  auto server = std::make_shared<Server>();
  server->place = std::make_shared<Engine>(*parsed, Role::kPrefill, options_.breaker);
  return servers_.emplace(url, std::move(server)).first->second;
}

std::string Prefetches::head_for(const Server& server, std::string_view method,
                                 std::string_view target, std::string_view body) const {
  const std::string token = cluster::http_token(
      secrets_->first(), {.time = static_cast<std::uint64_t>(std::time(nullptr)),
                          .method = method,
                          .target = target,
                          .body = body});
  return request_head(*server.place, method, target, token, body.size());
}

std::uint64_t Prefetches::start(PrefetchOrder order) {
  if (!secrets_) return 0;
  const std::shared_ptr<Server> server = server_of(order.server);
  if (server == nullptr || server->in_flight >= options_.per_server) {
    routing_.prefetch_became(order, PrefetchState::kBusy);
    return 0;
  }
  const TimePoint now = std::chrono::steady_clock::now();
  if (!server->place->breaker.allows(now)) {
    routing_.prefetch_became(order, PrefetchState::kSuspended);
    return 0;
  }
  server->place->breaker.started(now);
  const std::uint64_t number = next_++;
  const auto one =
      std::make_shared<One>(One{.order = std::move(order),
                                .id = fmt::format("r{:016x}-{}", options_.seed, number),
                                .server = server});
  routing_.prefetch_became(one->order, PrefetchState::kSent);
  running_.emplace(number, one);
  ++server->in_flight;
  asio::co_spawn(connections_.io(), post(one), asio::detached);
  return number;
}

asio::awaitable<void> Prefetches::post(Shared one) {
  const std::shared_ptr<Engine> place = one->server->place;
  const std::string body = one->order.body(one->id);
  std::string head = head_for(*one->server, "POST", "/prefetch", body);
  // An id that is running is not started again, so the request may be repeated.
  const Result<ShortResponse> got = co_await ask_engine(connections_, place, std::move(head), body,
                                                        options_.timeout, kAnswerBytes);
  --one->server->in_flight;
  const bool is_accepted = got && got->status == kAccepted;
  const std::uint64_t opened = place->breaker.opened();
  if (is_accepted) {
    place->breaker.succeeded();
  } else {
    place->breaker.failed(std::chrono::steady_clock::now());
  }
  if (opened == 0 && place->breaker.opened() > 0) {
    g_log.warn("a server does not prefetch, so it is asked less often server={} why=\"{}\"",
               place->url.text,
               got ? fmt::format("POST /prefetch returned {}", got->status) : got.error().detail);
  }
  routing_.prefetch_became(one->order, is_accepted ? PrefetchState::kAccepted
                                       : got       ? PrefetchState::kRefused
                                                   : PrefetchState::kFailed);
  one->is_answered = true;
  one->was_sent = is_accepted || (!got && got.error().code != Errc::kRefused);
  if (one->is_cancelled && one->was_sent) co_await remove(one);
}

asio::awaitable<void> Prefetches::remove(Shared one) {
  // Without it the prefetch ends by itself, after some seconds.
  if (!secrets_ || one->server->in_flight >= options_.per_server) co_return;
  ++one->server->in_flight;
  std::string head = head_for(*one->server, "DELETE", "/prefetch/" + one->id, {});
  (void)co_await ask_engine(connections_, one->server->place, std::move(head), {}, options_.timeout,
                            kAnswerBytes);
  --one->server->in_flight;
}

void Prefetches::cancel(std::uint64_t number) {
  const auto found = running_.find(number);
  if (found == running_.end()) return;
  const Shared one = found->second;
  running_.erase(found);
  if (one->is_answered && !one->was_sent) return;
  routing_.prefetch_was_cancelled(one->order);
  one->is_cancelled = true;
  // post() sends it otherwise: an earlier one could overtake the prefetch.
  if (one->is_answered) asio::co_spawn(connections_.io(), remove(one), asio::detached);
}

}  // namespace pegaflow::router
