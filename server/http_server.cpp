#include "server/http_server.h"

#include <cerrno>
#include <charconv>
#include <fstream>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include <netinet/in.h>
#include <sys/socket.h>

#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <kj/compat/http.h>
#include <nlohmann/json.hpp>

#include "base/assert.h"
#include "base/log.h"
#include "server/metrics_page.h"
#include "server/rpc_error.h"
#include "version.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"http"};

/// A scraper, a probe and a person, many times over.
constexpr std::size_t kConnections = 128;
constexpr std::size_t kNews = 512;

struct Reply {
  unsigned status = 200;
  std::string body;
  const char* type = "application/json";
};

const char* reason(unsigned status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    default:
      return "Service Unavailable";
  }
}

Reply json_reply(unsigned status, const nlohmann::json& body) {
  // Ids come from clients: what is no UTF-8 is shown as such, not thrown about.
  return {.status = status,
          .body = body.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"};
}

Reply error_reply(unsigned status, const std::string& text) {
  return json_reply(status, {{"error", text}});
}

/// The nodes of memory that the pool lies on, with the bytes of their parts.
nlohmann::json to_json(const PoolPlacement& placement) {
  nlohmann::json nodes = nlohmann::json::array();
  for (std::size_t i = 0; i < placement.nodes.size(); ++i) {
    nlohmann::json node = {{"node", placement.nodes[i].number}};
    if (i < placement.ranges.size()) {
      node["bytes"] = placement.ranges[i].end - placement.ranges[i].begin;
    }
    nodes.push_back(std::move(node));
  }
  nlohmann::json body = {{"policy", to_string(placement.policy)}, {"nodes", std::move(nodes)}};
  if (!placement.refused.empty()) body["refused"] = placement.refused;
  if (placement.in_place) body["in_place"] = *placement.in_place;
  return body;
}

/// A peer that is away makes a node no less healthy: it computes what it cannot fetch.
nlohmann::json nodes_json(const Health& health) {
  nlohmann::json peers = nlohmann::json::array();
  for (const Health::Peer& peer : health.peers) {
    nlohmann::json row = {{"peer", peer.address}, {"state", peer.state}};
    if (!peer.node.empty()) row["node"] = peer.node;
    if (!peer.why.empty()) row["reason"] = peer.why;
    if (!peer.lane.empty()) row["lane"] = peer.lane;
    if (!peer.lane_why.empty()) row["lane_reason"] = peer.lane_why;
    peers.push_back(std::move(row));
  }
  nlohmann::json nodes = {{"node", health.node},
                          {"lane", health.lane},
                          {"listen", health.peer_listen},
                          {"peers", std::move(peers)}};
  if (!health.cards.empty()) nodes["cards"] = health.cards;
  if (!health.refused_cards.empty()) nodes["refused_cards"] = health.refused_cards;
  if (!health.why_not_rdma.empty()) nodes["no_rdma"] = health.why_not_rdma;
  return nodes;
}

Reply health_reply(const Health& health) {
  nlohmann::json body = {
      {"status", health.status}, {"version", kVersion}, {"pool_bytes", health.pool_bytes}};
  if (health.is_ok) {
    body["numa"] = to_json(health.placement);
    if (!health.lane.empty()) body["nodes"] = nodes_json(health);
  } else {
    body["done_bytes"] = health.done_bytes;
  }
  return json_reply(health.is_ok ? 200 : 503, body);
}

nlohmann::json to_json(const CacheService::InstanceInfo& info) {
  nlohmann::json factors = nlohmann::json::array();
  for (const NamespaceFactor& factor : info.factors) {
    factors.push_back({{"name", factor.name}, {"value", factor.value}});
  }
  nlohmann::json ranks = nlohmann::json::array();
  for (const CacheService::RankInfo& rank : info.ranks) {
    ranks.push_back({{"rank", rank.rank},
                     {"shard", rank.shard},
                     {"connected", rank.is_connected},
                     {"build", rank.build},
                     {"incarnation", to_string(rank.process)},
                     {"page_bytes", rank.page_bytes},
                     {"block_count", rank.block_count},
                     {"numa_node", rank.node}});
  }
  nlohmann::json body = {{"instance", info.id},
                         {"state", info.state},
                         {"connected", info.state == "connected"},
                         {"namespace", info.namespace_hash},
                         {"factors", std::move(factors)},
                         {"generation", info.generation},
                         {"rank_count", info.rank_count},
                         {"shard_count", info.shards},
                         {"ranks", std::move(ranks)},
                         {"schedulers", info.schedulers}};
  if (!info.ranks.empty()) {
    // Of the first rank, as they stood here when an instance had one.
    const CacheService::RankInfo& first = info.ranks.front();
    body["rank"] = first.rank;
    body["build"] = first.build;
    body["incarnation"] = to_string(first.process);
    body["page_bytes"] = first.page_bytes;
    body["block_count"] = first.block_count;
  }
  return body;
}

struct ToReply {
  Reply operator()(std::monostate /*none*/) const {
    return error_reply(503, "the server is not ready; see /health");
  }
  Reply operator()(const Snapshot& snapshot) const {
    return {.body = metrics_page(snapshot), .type = "text/plain; version=0.0.4; charset=utf-8"};
  }
  Reply operator()(const std::vector<CacheService::InstanceInfo>& instances) const {
    nlohmann::json list = nlohmann::json::array();
    for (const auto& instance : instances) list.push_back(to_json(instance));
    return json_reply(200, {{"instances", std::move(list)}});
  }
  Reply operator()(const CleanupReport& report) const {
    const std::uint64_t bytes = report.evicted_bytes;
    return json_reply(200, {{"evicted_blocks", report.evicted_blocks},
                            {"evicted_bytes", bytes},
                            {"reclaimed_bytes", bytes},  // Slots are free at once: the same here.
                            {"still_referenced_blocks", report.still_referenced_blocks}});
  }
  Reply operator()(const OverwriteReport& report) const {
    if (!report.found) return error_reply(404, "there is no such block");
    return json_reply(200, {{"slot", report.slot}, {"bytes", report.bytes}});
  }
};

bool is_loopback(kj::AsyncIoStream& stream) {
  sockaddr_storage peer{};
  kj::uint size = sizeof peer;
  stream.getpeername(reinterpret_cast<sockaddr*>(&peer), &size);
  if (peer.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
    return (ntohl(v4.sin_addr.s_addr) >> 24U) == 127;
  }
  if (peer.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(peer);
    if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) return v6.sin6_addr.s6_addr[12] == 127;
    return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
  }
  return false;
}

/// Takes as long for a wrong token as for the right one.
bool is_same(std::string_view given, std::string_view wanted) {
  if (given.size() != wanted.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < given.size(); ++i) {
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(wanted[i]);
  }
  return difference == 0;
}

/// N of "recent=N".
std::optional<std::uint64_t> recent_of(std::string_view query) {
  constexpr std::string_view kName = "recent=";
  if (!query.starts_with(kName)) return std::nullopt;
  query.remove_prefix(kName.size());
  std::uint64_t number = 0;
  const auto [rest, status] = std::from_chars(query.data(), query.data() + query.size(), number);
  if (status != std::errc() || rest != query.data() + query.size()) return std::nullopt;
  return number;
}

/// What a path means.
struct Route {
  std::string_view path;
  bool is_post = false;
  std::optional<AdminQuestion::Kind> question;  ///< None: /health, which we know ourselves.
  bool is_test_hook = false;
};
constexpr Route kRoutes[] = {
    {"/health", false, std::nullopt, false},
    {"/metrics", false, AdminQuestion::Kind::kMetrics, false},
    {"/instances", false, AdminQuestion::Kind::kInstances, false},
    {"/cache/memory/cleanup", true, AdminQuestion::Kind::kCleanup, false},
    {"/test/overwrite_block", true, AdminQuestion::Kind::kOverwriteBlock, true},
};

}  // namespace

/// Everything that lives on the thread.
class HttpServer::Loop final : private kj::TaskSet::ErrorHandler,
                               private kj::HttpServerErrorHandler {
 public:
  explicit Loop(HttpServer& server)
      : server_(server),
        io_(kj::setupAsyncIo()),
        stop_(kj::newPromiseAndFulfiller<void>()),
        news_(io_.unixEventPort, server.news_.fd(), kj::UnixEventPort::FdObserver::OBSERVE_READ),
        listener_(io_.lowLevelProvider->wrapListenSocketFd(
            server.listener_.fd.get(), kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC |
                                           kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK)),
        health_(server.options_.health),
        tasks_(*this) {
    kj::HttpHeaderTable::Builder builder;
    authorization_ = builder.add("Authorization");
    headers_ = builder.build();
    kj::HttpServerSettings settings;
    settings.errorHandler = *this;
    http_ = kj::heap<kj::HttpServer>(
        io_.provider->getTimer(), *headers_,
        [this](kj::AsyncIoStream& stream) -> kj::Own<kj::HttpService> {
          return kj::heap<Service>(*this, is_loopback(stream));
        },
        settings);
  }

  void run() {
    tasks_.add(read_news());
    tasks_.add(accept());
    stop_.promise.wait(io_.waitScope);
  }

 private:
  /// Of one connection.
  class Service final : public kj::HttpService {
   public:
    Service(Loop& loop, bool is_from_here) : loop_(loop), is_from_here_(is_from_here) {}

    kj::Promise<void> request(kj::HttpMethod method, kj::StringPtr url,
                              const kj::HttpHeaders& headers, kj::AsyncInputStream& /*body*/,
                              Response& response) override {
      return loop_
          .reply_to(method, std::string_view(url.begin(), url.size()),
                    is_from_here_ || has_token(headers))
          .then([this, &response](Reply reply) { return send(kj::mv(reply), response); });
    }

   private:
    [[nodiscard]] bool has_token(const kj::HttpHeaders& headers) const {
      const std::string& token = loop_.server_.options_.token;
      if (token.empty()) return false;
      KJ_IF_MAYBE (value, headers.get(loop_.authorization_)) {
        return is_same(std::string_view(value->begin(), value->size()), "Bearer " + token);
      }
      return false;
    }

    kj::Promise<void> send(Reply reply, Response& response) {
      kj::HttpHeaders headers(*loop_.headers_);
      headers.set(kj::HttpHeaderId::CONTENT_TYPE, reply.type);
      auto body = kj::heap<std::string>(std::move(reply.body));
      auto stream = response.send(reply.status, reason(reply.status), headers, body->size());
      auto written = stream->write(body->data(), body->size());
      return written.attach(kj::mv(stream), kj::mv(body));
    }

    Loop& loop_;
    bool is_from_here_;
  };

  kj::Promise<void> accept() {
    return listener_->accept().then(
        [this](kj::Own<kj::AsyncIoStream>&& stream) {
          if (connections_ < kConnections) serve(kj::mv(stream));
          return accept();
        },
        [this](kj::Exception&& problem) {
          // Out of descriptors, most likely: it passes, and nobody waits for us.
          kLog.warn("accepting failed, trying again reason=\"{}\"", error_from(problem).detail);
          return io_.provider->getTimer().afterDelay(100 * kj::MILLISECONDS).then([this]() {
            return accept();
          });
        });
  }

  void serve(kj::Own<kj::AsyncIoStream> stream) {
    ++connections_;
    // A client that goes away in the middle is no error of ours.
    tasks_.add(http_->listenHttp(kj::mv(stream))
                   .catch_([](kj::Exception&& problem) {
                     kLog.debug("connection ended reason=\"{}\"", error_from(problem).detail);
                   })
                   .then([this]() { --connections_; }));
  }

  kj::Promise<void> read_news() {
    return news_.whenBecomesReadable().then([this]() {
      take_news();
      return read_news();
    });
  }

  void take_news() {
    server_.news_.drain([this](HttpNews&& news) {
      if (news.is_stop) {
        stop_.fulfiller->fulfill();
      } else if (news.ticket == 0) {
        health_ = std::move(news.health);
      } else if (const auto asked = asked_.find(news.ticket); asked != asked_.end()) {
        asked->second->fulfill(kj::mv(news.answer));
        asked_.erase(asked);
      }
    });
  }

  kj::Promise<Reply> reply_to(kj::HttpMethod method, std::string_view url, bool may_post) {
    // Who has read the ready file is not to be told that the server is not ready: the loop may see
    // the request before the news that were sent earlier.
    take_news();
    const std::size_t mark = url.find('?');
    const std::string_view path = url.substr(0, mark);
    const std::string_view query =
        mark == std::string_view::npos ? std::string_view() : url.substr(mark + 1);
    for (const Route& route : kRoutes) {
      if (route.path != path || (route.is_test_hook && !server_.options_.test_hooks)) continue;
      const kj::HttpMethod wanted = route.is_post ? kj::HttpMethod::POST : kj::HttpMethod::GET;
      if (method != wanted) {
        return error_reply(405, fmt::format("{} takes {}", path, route.is_post ? "POST" : "GET"));
      }
      if (route.is_post && !may_post) {
        return server_.options_.token.empty()
                   ? error_reply(403, "POST from beyond this machine needs --http-token-file")
                   : error_reply(401, "the token is missing or wrong");
      }
      if (!route.question) return health_reply(health_);
      AdminQuestion question{.kind = *route.question, .ticket = 0, .argument = 0};
      if (route.is_test_hook) {
        const auto recent = recent_of(query);
        if (!recent) return error_reply(400, "recent=N is needed");
        question.argument = *recent;
      }
      return ask(question);
    }
    return error_reply(404,
                       "there are /health, /metrics, /instances and POST /cache/memory/cleanup");
  }

  kj::Promise<Reply> ask(AdminQuestion question) {
    if (!health_.is_ok) return error_reply(503, "the server is not ready: " + health_.status);
    question.ticket = ++last_ticket_;
    if (asked_.size() >= kQuestions || !server_.questions_.try_send(question)) {
      return error_reply(503, "too many requests at once");
    }
    auto answer = kj::newPromiseAndFulfiller<AdminAnswer>();
    asked_.emplace(question.ticket, kj::mv(answer.fulfiller));
    // A question that timed out keeps its place until the answer comes, which then nobody reads.
    return io_.provider->getTimer()
        .timeoutAfter(server_.options_.answer_timeout.count() * kj::NANOSECONDS,
                      kj::mv(answer.promise))
        .then([](AdminAnswer&& told) { return std::visit(ToReply(), told); },
              [](kj::Exception&& problem) {
                return error_reply(503,
                                   "the RPC thread did not answer: " + error_from(problem).detail);
              });
  }

  // ---- what is not HTTP, or fails

  kj::Promise<void> handleClientProtocolError(kj::HttpHeaders::ProtocolError problem,
                                              kj::HttpService::Response& response) override {
    return send_error(problem.statusCode, problem.description, response);
  }
  kj::Promise<void> handleApplicationError(
      kj::Exception problem, kj::Maybe<kj::HttpService::Response&> /*response*/) override {
    // Nothing here throws but a client that went away while we wrote.
    kLog.debug("request ended reason=\"{}\"", error_from(problem).detail);
    return kj::READY_NOW;
  }

  kj::Promise<void> send_error(unsigned status, kj::StringPtr text,
                               kj::HttpService::Response& response) {
    auto body =
        kj::heap<std::string>(error_reply(status, std::string(text.begin(), text.size())).body);
    kj::HttpHeaders headers(*headers_);
    headers.set(kj::HttpHeaderId::CONTENT_TYPE, "application/json");
    auto stream = response.send(status, reason(status), headers, body->size());
    auto written = stream->write(body->data(), body->size());
    return written.attach(kj::mv(stream), kj::mv(body));
  }

  void taskFailed(kj::Exception&& exception) override {
    kLog.error("serving failed reason=\"{}\"", error_from(exception).detail);
  }

  HttpServer& server_;
  kj::AsyncIoContext io_;
  kj::PromiseFulfillerPair<void> stop_;
  kj::UnixEventPort::FdObserver news_;
  kj::Own<kj::ConnectionReceiver> listener_;
  kj::HttpHeaderId authorization_;
  kj::Own<kj::HttpHeaderTable> headers_;
  kj::Own<kj::HttpServer> http_;
  Health health_;
  std::uint64_t last_ticket_ = 0;
  std::size_t connections_ = 0;
  std::map<std::uint64_t, kj::Own<kj::PromiseFulfiller<AdminAnswer>>> asked_;
  kj::TaskSet tasks_;
};

Result<std::unique_ptr<HttpServer>> HttpServer::start(TcpListener listener, Options options,
                                                      Mailbox<AdminQuestion>& questions) {
  std::unique_ptr<HttpServer> server(
      new HttpServer(std::move(listener), std::move(options), questions));
  try {
    server->thread_ = std::thread([&self = *server]() { self.run(); });
  } catch (const std::system_error& problem) {
    return fail(Errc::kInternal, "start the HTTP thread: {}", problem.what());
  }
  return server;
}

HttpServer::HttpServer(TcpListener listener, Options options, Mailbox<AdminQuestion>& questions)
    : listener_(std::move(listener)),
      options_(std::move(options)),
      questions_(questions),
      news_(kNews) {}

HttpServer::~HttpServer() {
  if (!thread_.joinable()) return;
  HttpNews stop;
  stop.is_stop = true;
  // What is not sent is not moved from. NOLINTNEXTLINE(bugprone-use-after-move)
  while (!news_.try_send(std::move(stop))) std::this_thread::yield();
  thread_.join();
}

bool HttpServer::publish(HttpNews news) { return news_.try_send(std::move(news)); }

void HttpServer::run() {
  KJ_IF_MAYBE (problem, kj::runCatchingExceptions([this]() { Loop(*this).run(); })) {
    PEGA_ASSERT(false, "the HTTP thread failed: {}", error_from(*problem).detail);
  }
}

Result<std::string> read_token(const std::string& path) {
  errno = 0;
  std::ifstream file(path);
  std::string token;
  if (!std::getline(file, token) && (!file.is_open() || file.bad())) {
    return fail(Errc::kRefused, "--http-token-file {}: cannot be read: {}", path,
                std::generic_category().message(errno == 0 ? EIO : errno));
  }
  while (!token.empty() && (token.back() == '\r' || token.back() == ' ')) token.pop_back();
  if (token.size() < 16) {
    return fail(Errc::kRefused, "--http-token-file {}: a token has at least 16 characters", path);
  }
  return token;
}

}  // namespace pegaflow
