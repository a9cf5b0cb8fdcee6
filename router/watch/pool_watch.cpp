#include "router/watch/pool_watch.h"

#include <ctime>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <fmt/format.h>

#include "cluster/peer_proof.h"
#include "router/http/log.h"
#include "router/kv/kv_routing.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// A server answers after 25 s if nothing happens.
constexpr Duration kJournalTimeout = std::chrono::seconds(40);
constexpr std::size_t kPageBytes = std::size_t{1} << 20U;
/// Enough for some thousand engines.
constexpr std::size_t kLinksBytes = std::size_t{4} << 20U;

}  // namespace

PoolWatch::PoolWatch(Shared& shared, const std::vector<EngineUrl>& servers)
    : shared_(shared),
      timer_(shared.io),
      names_(
          shared.io, [this] { use_servers(); },
          [this](const std::string& sentence) {
            ++shared_.metrics.name_errors;
            if (!sentence.empty()) g_log.warn("a name could not be resolved: {}", sentence);
          }) {
  EngineList list;
  list.by_role[0] = servers;
  names_.set(std::move(list));
  use_servers();
}

void PoolWatch::stop() {
  stopped_ = true;
  timer_.cancel();
  for (asio::steady_timer* const pause : pauses_) pause->cancel();
  names_.stop();
}

void PoolWatch::use_servers() {
  std::map<std::string, Place> places;
  const EngineList list = names_.engines();
  for (const EngineUrl& url : list.by_role[0]) {
    const auto known = places_.find(url.text);
    places.emplace(url.text, known != places_.end() ? known->second
                                                    : std::make_shared<Engine>(url, Role::kPrefill,
                                                                               Breaker::Options()));
  }
  places_ = std::move(places);
  shared_.kv->pools().set_servers(list.by_role[0]);
}

std::string PoolWatch::request_for(const Engine& place, std::string_view target) const {
  const std::string token = cluster::http_token(
      shared_.secrets->first(), {.time = static_cast<std::uint64_t>(std::time(nullptr)),
                                 .method = "GET",
                                 .target = target,
                                 .body = {}});
  return get_head(place, target, token);
}

asio::awaitable<Result<ShortResponse>> PoolWatch::get(Place place, std::string target,
                                                      Duration timeout, std::size_t limit) {
  std::string request = request_for(*place, target);
  Result<ShortResponse> got = co_await get_from_engine(shared_.engine_connections, place,
                                                       std::move(request), timeout, limit);
  if (got && got->status != 200) {
    got =
        fail(Errc::kRefused, "GET {} returned {}", target.substr(0, target.find('?')), got->status);
  }
  co_return got;
}

asio::awaitable<void> PoolWatch::ask_links(Place place) {
  const std::string url = place->url.text;
  const Result<ShortResponse> got =
      co_await get(place, "/links", shared_.options.health_timeout, kLinksBytes);
  asking_.erase(url);
  if (stopped_ || !places_.contains(url)) co_return;
  KvPools& pools = shared_.kv->pools();
  const Result<LinksPage> page =
      got ? LinksPage::read(got->body) : Result<LinksPage>(tl::unexpected<Error>(got.error()));
  const auto node = pools.nodes().find(url);
  const bool was_good = node == pools.nodes().end() || node->second.error.empty();
  if (!page) {
    pools.lost(url, page.error().detail);
    if (was_good) {
      g_log.warn("a server does not tell its links and blocks server={} why=\"{}\"", url,
                 page.error().detail);
    }
    co_return;
  }
  pools.set_links(url, *page);
  if (!was_good) g_log.info("a server tells its links and blocks again server={}", url);
  const auto now = pools.nodes().find(url);
  if (now == pools.nodes().end()) co_return;
  for (const auto& [space, pool] : now->second.pools) {
    if (following_.emplace(url, space).second) {
      asio::co_spawn(shared_.io, follow(place, space), asio::detached);
    }
  }
}

asio::awaitable<void> PoolWatch::follow(Place place, std::string space) {
  const std::string url = place->url.text;
  asio::steady_timer pause(shared_.io);
  KvPools& pools = shared_.kv->pools();
  while (!stopped_) {
    const auto node = pools.nodes().find(url);
    // Without its links the server is down; ask_links() begins again.
    if (node == pools.nodes().end() || !node->second.error.empty()) break;
    const std::string target = pools.next_target(url, space);
    if (target.empty()) break;
    const bool has_chains = target.find("&chains=") != std::string::npos;
    const Result<ShortResponse> got = co_await get(place, target, kJournalTimeout, kPageBytes);
    if (stopped_) break;
    // Meanwhile the pool may be read otherwise, and is asked so.
    if (pools.next_target(url, space) != target) continue;
    const Result<PoolPage> page = got ? PoolPage::read(got->body, has_chains)
                                      : Result<PoolPage>(tl::unexpected<Error>(got.error()));
    if (page) {
      pools.answered(url, space, *page);
      continue;
    }
    pools.failed(url, space, page.error().detail);
    boost::system::error_code ignored;
    pause.expires_after(shared_.options.health_interval);
    pauses_.insert(&pause);
    co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    pauses_.erase(&pause);
  }
  following_.erase({url, space});
}

asio::awaitable<void> PoolWatch::run() {
  while (!stopped_) {
    names_.ask();
    for (const auto& [url, place] : places_) {
      if (asking_.insert(url).second) {
        asio::co_spawn(shared_.io, ask_links(place), asio::detached);
      }
    }
    boost::system::error_code ignored;
    timer_.expires_after(shared_.options.health_interval);
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

}  // namespace pegaflow::router
