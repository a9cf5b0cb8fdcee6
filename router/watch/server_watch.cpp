#include "router/watch/server_watch.h"

#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "router/body/split.h"
#include "router/http/log.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// Enough for some thousand instances with their ranks.
constexpr std::size_t kAnswerBytes = std::size_t{8} * 1024 * 1024;

}  // namespace

ServerWatch::ServerWatch(Shared& shared, const std::vector<EngineUrl>& servers)
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
  shared_.namespaces.is_watched = !servers.empty();
  shared_.namespaces.wants_direct = shared.options.flow == kDirectFlow;
  use_servers();
}

void ServerWatch::stop() {
  stopped_ = true;
  timer_.cancel();
  names_.stop();
}

void ServerWatch::use_servers() {
  std::map<std::string, std::shared_ptr<Server>> servers;
  const EngineList list = names_.engines();
  for (const EngineUrl& url : list.by_role[0]) {
    const auto known = servers_.find(url.text);
    if (known != servers_.end()) {
      servers.emplace(url.text, known->second);
      continue;
    }
    const auto server = std::make_shared<Server>();
    server->place = std::make_shared<Engine>(url, Role::kPrefill, Breaker::Options());
    servers.emplace(url.text, server);
  }
  servers_ = std::move(servers);
  compare();
}

asio::awaitable<void> ServerWatch::ask(std::shared_ptr<Server> server) {
  server->is_asked = true;
  std::string request = get_head(*server->place, "/instances");
  const Result<ShortResponse> got =
      co_await get_from_engine(shared_.engine_connections, server->place, std::move(request),
                               shared_.options.health_timeout, kAnswerBytes);
  server->is_asked = false;
  if (stopped_) co_return;
  std::string why;
  server->instances.clear();
  if (!got) {
    why = got.error().detail;
  } else if (got->status != 200) {
    why = fmt::format("status {}", got->status);
  } else {
    auto instances = read_instances(got->body);
    if (instances) {
      server->instances = std::move(*instances);
    } else {
      why = instances.error().detail;
    }
  }
  const bool was_up = std::exchange(server->is_up, why.empty());
  const bool is_first = !std::exchange(server->was_asked, true);
  if (!server->is_up && (was_up || is_first)) {
    g_log.warn("a server does not return its namespaces server={} why=\"{}\"",
               server->place->url.text, why);
  } else if (server->is_up && !was_up && !is_first) {
    g_log.info("a server returns its namespaces again server={}", server->place->url.text);
  }
  compare();
}

void ServerWatch::compare() {
  const std::vector<std::string>& prefixes = shared_.options.instances;
  std::vector<InstanceNamespace> all;
  std::vector<ServedInstance> served;
  NamespaceView& view = shared_.namespaces;
  view.servers.clear();
  for (const auto& [url, server] : servers_) {
    view.servers.push_back({url, server->is_up});
    for (const InstanceNamespace& each : server->instances) {
      const bool counts = prefixes.empty() ||
                          std::any_of(prefixes.begin(), prefixes.end(), [&](const auto& prefix) {
                            return each.instance.compare(0, prefix.size(), prefix) == 0;
                          });
      if (!counts) continue;
      all.push_back(each);
      served.push_back({url, &each});
    }
  }
  pair(served);
  view.report = compare_namespaces(all);
  std::string text = view.report.text();
  if (text == last_text_) return;
  if (text.empty()) {
    g_log.info("all engines share one namespace instances={}", all.size());
  } else {
    g_log.warn("engines do not share one namespace and find nothing of each other: {}", text);
  }
  last_text_ = std::move(text);
}

void ServerWatch::pair(std::span<const ServedInstance> instances) {
  NamespaceView& view = shared_.namespaces;
  view.direct = pair_engines(instances);
  const bool all_answered =
      std::ranges::all_of(servers_, [](const auto& each) { return each.second->was_asked; });
  if (!view.wants_direct || instances.empty() || !all_answered) return;
  std::string text = view.direct.text();
  if (text == last_direct_text_) return;
  if (text.empty()) {
    g_log.info("every engine has one whose memory it can read instances={}", instances.size());
  } else {
    g_log.warn(
        "--flow direct: engines without another one whose memory they can read load from the "
        "pool: {}",
        text);
  }
  last_direct_text_ = std::move(text);
}

asio::awaitable<void> ServerWatch::run() {
  if (!shared_.namespaces.is_watched) co_return;
  while (!stopped_) {
    names_.ask();
    for (const auto& [url, server] : servers_) {
      if (!server->is_asked) asio::co_spawn(shared_.io, ask(server), asio::detached);
    }
    boost::system::error_code ignored;
    timer_.expires_after(shared_.options.health_interval);
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

}  // namespace pegaflow::router
