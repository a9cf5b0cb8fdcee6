#include "server/http/http_server.h"

#include <charconv>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include <sys/socket.h>
#include <unistd.h>

#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <kj/compat/http.h>
#include <nlohmann/json.hpp>

#include "base/assert.h"
#include "base/log.h"
#include "base/os/text_file.h"
#include "capnp/wire/rpc_error.h"
#include "server/cache/background.h"
#include "server/http/http_connections.h"
#include "server/http/http_guard.h"
#include "server/http/http_turns.h"
#include "server/http/metrics_page.h"
#include "version.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"http"};

constexpr std::size_t kNews = 512;
constexpr int kSendBufferBytes = 64 << 10;  ///< Two pages of /metrics; the kernel doubles it.

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
  // Ids come from clients: invalid UTF-8 is replaced, and throws no exception.
  return {.status = status,
          .body = body.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"};
}

Reply error_reply(unsigned status, const std::string& text) {
  return json_reply(status, {{"error", text}});
}

/// The NUMA nodes of the pool, with the bytes of their parts.
nlohmann::json to_json(const engine::PoolPlacement& placement) {
  nlohmann::json nodes = nlohmann::json::array();
  for (std::size_t i = 0; i < placement.numa_nodes.size(); ++i) {
    nlohmann::json node = {{"node", placement.numa_nodes[i].number}};
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

/// An unreachable peer does not make a node unhealthy: engines compute what it cannot fetch.
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

/// A disk that failed does not make a node unhealthy: its blocks are misses.
nlohmann::json keeper_json(const KeptReport& kept) {
  nlohmann::json keeper = {{"state", kept.has_keeper ? "holding" : "missing"},
                           {"socket", kept.socket},
                           {"adopted_blocks", kept.adopted_blocks},
                           {"former_clients", kept.former_clients},
                           {"waits_for_nodes", kept.waits_for_nodes}};
  if (!kept.has_keeper) keeper["why"] = kept.why_not;
  return keeper;
}

nlohmann::json disks_json(const Health& health) {
  nlohmann::json disks = nlohmann::json::array();
  for (const SsdReport::OneDisk& disk : health.disks) {
    disks.push_back({{"path", disk.path},
                     {"state", disk.state},
                     {"io", disk.backend},
                     {"io_reason", disk.backend_reason},
                     {"segments", disk.segments},
                     {"scanned_segments", disk.scanned_segments},
                     {"direct", disk.direct},
                     {"capacity_bytes", disk.capacity_bytes},
                     {"slow", disk.is_slow},
                     {"index_bytes", disk.index_bytes},
                     {"index_limit_bytes", disk.index_limit_bytes}});
  }
  return disks;
}

Reply health_reply(const Health& health) {
  nlohmann::json body = {
      {"status", health.status}, {"version", kVersion}, {"pool_bytes", health.pool_bytes}};
  if (health.is_ok) {
    body["numa"] = to_json(health.placement);
    if (!health.lane.empty()) body["nodes"] = nodes_json(health);
    if (!health.disks.empty()) body["ssd"] = disks_json(health);
    if (health.kept) body["keeper"] = keeper_json(*health.kept);
  } else {
    body["done_bytes"] = health.done_bytes;
  }
  return json_reply(health.is_ok ? 200 : 503, body);
}

/// Adds what one side of an engine reported about itself.
void add_engine(nlohmann::json& body, const std::optional<EngineInfo>& engine) {
  if (!engine) return;
  body["loads"] = engine->loads;
  body["saves"] = engine->saves;
}

nlohmann::json to_json(const std::vector<DeclinedInfo>& sides) {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& [decline, build] : sides) {
    nlohmann::json row = {{"side", pegaflow::to_string(decline.side)},
                          {"reason", pegaflow::to_string(decline.reason)},
                          {"detail", decline.detail},
                          {"build", build}};
    if (decline.side == wire::Side::WORKER) row["rank"] = decline.rank;
    list.push_back(std::move(row));
  }
  return list;
}

nlohmann::json to_json(const std::vector<engine::BlockKind>& kinds) {
  nlohmann::json list = nlohmann::json::array();
  for (const engine::BlockKind& kind : kinds) {
    nlohmann::json row = {{"kind", engine::to_string(kind.rule)},
                          {"block_tokens", kind.block_tokens}};
    if (kind.tokens != 0) row["tokens"] = kind.tokens;
    list.push_back(std::move(row));
  }
  return list;
}

nlohmann::json to_json(const InstanceInfo& info) {
  nlohmann::json factors = nlohmann::json::array();
  for (const engine::NamespaceFactor& factor : info.factors) {
    factors.push_back({{"name", factor.name}, {"value", factor.value}});
  }
  nlohmann::json ranks = nlohmann::json::array();
  for (const RankInfo& rank : info.ranks) {
    ranks.push_back({{"rank", rank.rank},
                     {"shard", rank.shard},
                     {"connected", rank.is_connected},
                     {"build", rank.build},
                     {"incarnation", to_string(rank.process)},
                     {"page_bytes", rank.page_bytes.front()},
                     {"block_count", rank.block_count},
                     {"numa_node", rank.numa_node}});
    if (rank.cells != 0) ranks.back()["cells"] = rank.cells;
    if (!info.kinds.kinds.empty()) ranks.back()["page_bytes_by_kind"] = rank.page_bytes;
    add_engine(ranks.back(), rank.engine);
    if (rank.engine) {
      ranks.back()["device"] = rank.engine->device;
      ranks.back()["kernels"] = pegaflow::to_string(rank.engine->kernels);
      ranks.back()["copy_path"] = pegaflow::to_string(rank.engine->copy_path);
    }
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
                         {"schedulers", info.schedulers},
                         {"not_served", to_json(info.not_served)}};
  if (!info.kinds.kinds.empty()) {
    body["kinds"] = to_json(info.kinds.kinds);
    body["unit_tokens"] = info.kinds.unit_tokens;
    body["alignment_tokens"] = info.kinds.alignment_tokens;
  }
  add_engine(body, info.scheduler);
  if (!info.ranks.empty()) {
    // Fields of the first rank, for readers from the time when an instance had one rank.
    const RankInfo& first = info.ranks.front();
    body["rank"] = first.rank;
    body["build"] = first.build;
    body["incarnation"] = to_string(first.process);
    body["page_bytes"] = first.page_bytes.front();
    body["block_count"] = first.block_count;
  }
  return body;
}

struct ToReply {
  const HttpCounters& http;

  Reply operator()(std::monostate /*none*/) const {
    return error_reply(503, "the server is not ready; see /health");
  }
  Reply operator()(Snapshot& snapshot) const {
    snapshot.http = http;
    return {.body = metrics_page(snapshot), .type = "text/plain; version=0.0.4; charset=utf-8"};
  }
  Reply operator()(const std::vector<InstanceInfo>& instances) const {
    nlohmann::json list = nlohmann::json::array();
    for (const auto& instance : instances) list.push_back(to_json(instance));
    return json_reply(200, {{"instances", std::move(list)}});
  }
  Reply operator()(const CleanupReport& report) const {
    const std::uint64_t bytes = report.evicted_bytes;
    return json_reply(200, {{"evicted_blocks", report.evicted_blocks},
                            {"evicted_bytes", bytes},
                            {"reclaimed_bytes", bytes},  // Slots are free at once: equal.
                            {"still_referenced_blocks", report.still_referenced_blocks}});
  }
  Reply operator()(const SsdCleanupReport& report) const {
    if (!report.has_disks) {
      return error_reply(409, "the server has no SSD tier: start it with --ssd-cache-path");
    }
    if (!report.is_durable) {
      return error_reply(500,
                         "the blocks are not found any longer, but a disk did not record it: after "
                         "a restart they may be found again; see the server's log");
    }
    return json_reply(200, {{"dropped_blocks", report.dropped_blocks}});
  }
  Reply operator()(const OverwriteReport& report) const {
    if (!report.found) return error_reply(404, "there is no such block");
    return json_reply(200, {{"slot", report.slot}, {"bytes", report.bytes}});
  }
};

std::string machine_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
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

/// The meaning of a path.
struct Route {
  std::string_view path;
  bool is_post = false;
  std::optional<AdminQuestion::Kind> question;  ///< None: /health, which needs no question.
  bool is_test_hook = false;
};
constexpr std::string_view kHealthPath = "/health";
constexpr Route kRoutes[] = {
    {kHealthPath, false, std::nullopt, false},
    {"/metrics", false, AdminQuestion::Kind::kMetrics, false},
    {"/instances", false, AdminQuestion::Kind::kInstances, false},
    {"/cache/memory/cleanup", true, AdminQuestion::Kind::kCleanup, false},
    {"/cache/ssd/cleanup", true, AdminQuestion::Kind::kSsdCleanup, false},
    {"/test/overwrite_block", true, AdminQuestion::Kind::kOverwriteBlock, true},
};

}  // namespace

/// The state of the HTTP thread.
class HttpServer::Loop final : private kj::TaskSet::ErrorHandler,
                               private kj::HttpServerErrorHandler {
 public:
  explicit Loop(HttpServer& server)
      : server_(server),
        io_(kj::setupAsyncIo()),
        stop_(kj::newPromiseAndFulfiller<void>()),
        news_(io_.unixEventPort, server.news_.fd(), kj::UnixEventPort::FdObserver::OBSERVE_READ),
        listener_(wrap(server.listener_.fd.get())),
        guard_(server.options_.token, server.socket_ ? server.socket_->path().string() : "",
               machine_name()),
        health_(server.options_.health),
        connections_(server.options_.connections, io_.provider->getTimer()),
        tasks_(*this) {
    if (server.socket_) socket_ = wrap(server.socket_->fd());
    kj::HttpHeaderTable::Builder builder;
    authorization_ = builder.add("Authorization");
    origin_ = builder.add("Origin");
    headers_ = builder.build();
    kj::HttpServerSettings settings;
    settings.errorHandler = *this;
    http_ = kj::heap<kj::HttpServer>(
        io_.provider->getTimer(), *headers_,
        [this](kj::AsyncIoStream& stream) -> kj::Own<kj::HttpService> {
          return kj::heap<Service>(*this, kj::downcast<HttpConnection>(stream));
        },
        settings);
  }

  void run() {
    tasks_.add(read_news());
    tasks_.add(accept(*listener_, false));
    if (socket_.get() != nullptr) tasks_.add(accept(*socket_, true));
    stop_.promise.wait(io_.waitScope);
  }

 private:
  /// Serves one connection.
  class Service final : public kj::HttpService {
   public:
    Service(Loop& loop, HttpConnection& connection) : loop_(loop), connection_(connection) {}

    kj::Promise<void> request(kj::HttpMethod method, kj::StringPtr url,
                              const kj::HttpHeaders& headers, kj::AsyncInputStream& /*body*/,
                              Response& response) override {
      connection_.begin_request();
      // One request of a connection in an event-loop iteration: thousands of pipelined requests,
      // all of them received already, would keep the loop from polling its other descriptors.
      return next_turn(loop_.timer())
          .then([this, method, url, &headers]() {
            return loop_.reply_in_turn(method, std::string_view(url.begin(), url.size()), headers,
                                       connection_.is_socket());
          })
          .then([this, &response](Reply reply) { return send(kj::mv(reply), response); })
          .attach(kj::defer([this]() { connection_.end_request(); }));
    }

   private:
    kj::Promise<void> send(Reply reply, Response& response) {
      kj::HttpHeaders headers(*loop_.headers_);
      headers.set(kj::HttpHeaderId::CONTENT_TYPE, reply.type);
      auto body = kj::heap<std::string>(std::move(reply.body));
      auto stream = response.send(reply.status, reason(reply.status), headers, body->size());
      auto written = stream->write(body->data(), body->size());
      return written.attach(kj::mv(stream), kj::mv(body));
    }

    Loop& loop_;
    HttpConnection& connection_;
  };

  kj::Timer& timer() { return io_.provider->getTimer(); }

  kj::Own<kj::ConnectionReceiver> wrap(int listening_fd) {
    return io_.lowLevelProvider->wrapListenSocketFd(
        listening_fd, kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC |
                          kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK);
  }

  kj::Promise<void> accept(kj::ConnectionReceiver& listener, bool is_socket) {
    return listener.accept().then(
        [this, &listener, is_socket](kj::Own<kj::AsyncIoStream>&& stream) {
          if (!is_socket || is_allowed(*stream)) serve(kj::mv(stream), is_socket);
          return accept(listener, is_socket);
        },
        [this, &listener, is_socket](kj::Exception&& problem) {
          // Out of descriptors, most likely: that is temporary, and no request waits.
          kLog.warn("accepting failed, trying again reason=\"{}\"", error_from(problem).detail);
          return timer().afterDelay(100 * kj::MILLISECONDS).then([this, &listener, is_socket]() {
            return accept(listener, is_socket);
          });
        });
  }

  /// The user at the other end of the Unix socket.
  bool is_allowed(kj::AsyncIoStream& stream) {
    KJ_IF_MAYBE (fd, stream.getFd()) {
      const auto peer = peer_of(*fd);
      if (peer && may_connect(peer->uid, server_.options_.allowed_uids)) return true;
    }
    connections_.note_refused_user();
    return false;
  }

  void serve(kj::Own<kj::AsyncIoStream> stream, bool is_socket) {
    // Otherwise the kernel would keep megabytes for each of 128 clients that do not read.
    const int send_buffer = kSendBufferBytes;
    stream->setsockopt(SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof send_buffer);
    kj::Own<HttpConnection> connection = connections_.add(kj::mv(stream), is_socket);
    auto end = connection->on_end();
    // A client that disconnects is not an error of the server.
    tasks_.add(http_->listenHttp(kj::mv(connection))
                   .exclusiveJoin(kj::mv(end))
                   .catch_([](kj::Exception&& problem) {
                     kLog.debug("connection ended reason=\"{}\"", error_from(problem).detail);
                   }));
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
        server_.health_noted_.store(false, std::memory_order_release);
        const std::lock_guard lock(server_.health_mutex_);
        health_ = server_.latest_health_;
      } else if (const auto asked = asked_.find(news.ticket); asked != asked_.end()) {
        asked->second->fulfill(kj::mv(news.answer));
        asked_.erase(asked);
      }
    });
  }

  [[nodiscard]] std::optional<std::string_view> value_of(const kj::HttpHeaders& headers,
                                                         kj::HttpHeaderId name) const {
    KJ_IF_MAYBE (value, headers.get(name)) {
      return std::string_view(value->begin(), value->size());
    }
    return std::nullopt;
  }

  /// Serves one request of all connections in an event-loop iteration, except for /health, which is
  /// served at once: its delay does not depend on the requests of other clients.
  kj::Promise<Reply> reply_in_turn(kj::HttpMethod method, std::string_view url,
                                   const kj::HttpHeaders& headers, bool is_socket) {
    if (url.substr(0, url.find('?')) == kHealthPath) {
      return reply_to(method, url, headers, is_socket);
    }
    auto reply = turns_.next().then(
        [this, method, url, &headers, is_socket](kj::Own<HttpTurns::Turn>&& turn) {
          return next_turn(timer())
              .then([this, method, url, &headers, is_socket]() {
                return reply_to(method, url, headers, is_socket);
              })
              .attach(kj::mv(turn));
        });
    // The wait for the turn counts too: an RPC thread that hangs delays every client once.
    // The answer to a question that timed out is discarded; until then it keeps its place.
    return timer()
        .timeoutAfter(server_.options_.answer_timeout.count() * kj::NANOSECONDS, kj::mv(reply))
        .catch_([](kj::Exception&& problem) {
          return error_reply(503, "the RPC thread did not respond: " + error_from(problem).detail);
        });
  }

  kj::Promise<Reply> reply_to(kj::HttpMethod method, std::string_view url,
                              const kj::HttpHeaders& headers, bool is_socket) {
    // A client that has read the ready file must not receive "not ready": the loop may see the
    // request before the news that were sent earlier.
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
      if (route.is_post && !is_socket) {
        const auto refusal = guard_.refuse({.host = value_of(headers, kj::HttpHeaderId::HOST),
                                            .origin = value_of(headers, origin_),
                                            .authorization = value_of(headers, authorization_)});
        if (refusal) return error_reply(refusal->status, refusal->why);
      }
      if (!route.question) return health_reply(health_);
      AdminQuestion question{.kind = *route.question, .ticket = 0, .argument = 0};
      if (route.is_test_hook) {
        const auto recent = recent_of(query);
        if (!recent) return error_reply(400, "/test/overwrite_block: recent=N is missing");
        question.argument = *recent;
      }
      return ask(question);
    }
    return error_reply(404,
                       "unknown path: the server has /health, /metrics, /instances, and POST "
                       "/cache/memory/cleanup and /cache/ssd/cleanup");
  }

  kj::Promise<Reply> ask(AdminQuestion question) {
    if (!health_.is_ok) return error_reply(503, "the server is not ready: " + health_.status);
    question.ticket = ++last_ticket_;
    if (asked_.size() >= kQuestions || !server_.questions_.try_send(question)) {
      return error_reply(503, "too many requests at once");
    }
    auto answer = kj::newPromiseAndFulfiller<AdminAnswer>();
    asked_.emplace(question.ticket, kj::mv(answer.fulfiller));
    return answer.promise.then(
        [this](AdminAnswer&& told) { return std::visit(ToReply{connections_.counters()}, told); });
  }

  // ---- protocol errors and failures

  kj::Promise<void> handleClientProtocolError(kj::HttpHeaders::ProtocolError problem,
                                              kj::HttpService::Response& response) override {
    return send_error(problem.statusCode, problem.description, response);
  }
  kj::Promise<void> handleApplicationError(
      kj::Exception problem, kj::Maybe<kj::HttpService::Response&> /*response*/) override {
    // The only exception here is a client that disconnected during a write.
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
  kj::Own<kj::ConnectionReceiver> socket_;
  HttpGuard guard_;
  kj::HttpHeaderId authorization_;
  kj::HttpHeaderId origin_;
  kj::Own<kj::HttpHeaderTable> headers_;
  kj::Own<kj::HttpServer> http_;
  Health health_;
  std::uint64_t last_ticket_ = 0;
  HttpConnections connections_;
  HttpTurns turns_;
  std::map<std::uint64_t, kj::Own<kj::PromiseFulfiller<AdminAnswer>>> asked_;
  kj::TaskSet tasks_;
};

Result<std::unique_ptr<HttpServer>> HttpServer::start(TcpListener listener,
                                                      std::optional<Listener> socket,
                                                      Options options,
                                                      Mailbox<AdminQuestion>& questions) {
  std::unique_ptr<HttpServer> server(
      new HttpServer(std::move(listener), std::move(socket), std::move(options), questions));
  try {
    server->thread_ = std::thread([&self = *server]() { self.run(); });
  } catch (const std::system_error& problem) {
    return fail(Errc::kInternal, "start the HTTP thread: {}", problem.what());
  }
  return server;
}

HttpServer::HttpServer(TcpListener listener, std::optional<Listener> socket, Options options,
                       Mailbox<AdminQuestion>& questions)
    : listener_(std::move(listener)),
      socket_(std::move(socket)),
      options_(std::move(options)),
      questions_(questions),
      news_(kNews) {}

HttpServer::~HttpServer() {
  if (!thread_.joinable()) return;
  HttpNews stop;
  stop.is_stop = true;
  // A value that is not sent is not moved from. NOLINTNEXTLINE(bugprone-use-after-move)
  while (!news_.try_send(std::move(stop))) std::this_thread::yield();
  thread_.join();
}

bool HttpServer::publish(HttpNews news) { return news_.try_send(std::move(news)); }

void HttpServer::publish_health(Health health) {
  {
    const std::lock_guard lock(health_mutex_);
    latest_health_ = std::move(health);
  }
  // Pairs with the store in take_news(): either that reader sees this health, or this thread sees
  // its false and sends a note.
  if (health_noted_.exchange(true, std::memory_order_acq_rel)) return;
  const bool sent = news_.try_send(HttpNews());
  PEGA_ASSERT(sent, "answers have {} places of {}, and health two", kQuestions, news_.capacity());
}

void HttpServer::run() {
  KJ_IF_MAYBE (problem, kj::runCatchingExceptions([this]() { Loop(*this).run(); })) {
    PEGA_ASSERT(false, "the HTTP thread failed: {}", error_from(*problem).detail);
  }
}

Result<std::string> read_token(const std::string& path) {
  const Result<std::string> text = read_text_file(path);
  if (!text) return fail(Errc::kRefused, "--http-token-file {}: {}", path, text.error().detail);
  std::string token = text->substr(0, text->find('\n'));
  while (!token.empty() && (token.back() == '\r' || token.back() == ' ')) token.pop_back();
  if (token.size() < 16) {
    return fail(Errc::kRefused, "--http-token-file {}: a token has at least 16 characters", path);
  }
  return token;
}

}  // namespace pegaflow::server
