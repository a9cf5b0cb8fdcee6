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

#include "base/assert.h"
#include "base/log.h"
#include "base/os/text_file.h"
#include "capnp/wire/rpc_error.h"
#include "server/cache/background.h"
#include "server/http/http_connections.h"
#include "server/http/http_guard.h"
#include "server/http/http_reply.h"
#include "server/http/http_turns.h"
#include "server/http/router_pages.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"http"};

constexpr std::size_t kNews = 512;
/// The longest wait for a change of the journal, see RouterRequests, and some more.
constexpr Duration kLongestWait = std::chrono::seconds(27);
/// Before each part of a list of blocks, of 256 KiB at most: 50 MB/s.
constexpr kj::Duration kPauseOfLists = 5 * kj::MILLISECONDS;
constexpr int kSendBufferBytes = 64 << 10;  ///< Two pages of /metrics; the kernel doubles it.

std::string_view path_of(std::string_view url) { return url.substr(0, url.find('?')); }

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
        routers_(std::move(server.options_.routers)),
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
  /// Questions without an answer, by ticket.
  using Asked = std::map<std::uint64_t, kj::Own<kj::PromiseFulfiller<AdminAnswer>>>;

  /// Serves one connection.
  class Service final : public kj::HttpService {
   public:
    Service(Loop& loop, HttpConnection& connection) : loop_(loop), connection_(connection) {}

    kj::Promise<void> request(kj::HttpMethod method, kj::StringPtr url,
                              const kj::HttpHeaders& headers, kj::AsyncInputStream& body,
                              Response& response) override {
      connection_.begin_request();
      if (is_router_path(path_of(std::string_view(url.begin(), url.size())))) {
        return next_turn(loop_.timer())
            .then([this, method, url, &headers, &body]() {
              return loop_.reply_to_router(method, std::string_view(url.begin(), url.size()),
                                           headers, body, connection_.is_socket());
            })
            .then([this, &response](Reply reply) {
              connection_.begin_request();  // The time to wait for a change is not the client's.
              return send(kj::mv(reply), response);
            })
            .attach(kj::defer([this]() { connection_.end_request(); }));
      }
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
      } else {
        for (Asked* const places : {&asked_, &readers_}) {
          const auto asked = places->find(news.ticket);
          if (asked == places->end()) continue;
          asked->second->fulfill(kj::mv(news.answer));
          places->erase(asked);
          break;
        }
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
    return in_time(server_.options_.answer_timeout, kj::mv(reply));
  }

  // ---- routers

  /// Serves one of the pages of routers. A request for the journal may wait for half a minute, so
  /// it takes no turn; the others do.
  kj::Promise<Reply> reply_to_router(kj::HttpMethod method, std::string_view url,
                                     const kj::HttpHeaders& headers, kj::AsyncInputStream& body,
                                     bool is_socket) {
    auto read = method != kj::HttpMethod::POST ? kj::Promise<kj::String>(kj::str())
                                               : body.readAllText(kMostRouterBody);
    return timer()
        .timeoutAfter(server_.options_.answer_timeout.count() * kj::NANOSECONDS, kj::mv(read))
        .then(
            [this, method, url, &headers, is_socket](kj::String&& text) {
              return reply_to_router(method, url, headers,
                                     std::string_view(text.begin(), text.size()), is_socket);
            },
            [](kj::Exception&&) -> kj::Promise<Reply> {
              return error_reply(413, "the body did not arrive, or has more than 1 MiB");
            });
  }

  kj::Promise<Reply> reply_to_router(kj::HttpMethod method, std::string_view url,
                                     const kj::HttpHeaders& headers, std::string_view body,
                                     bool is_socket) {
    take_news();
    const kj::StringPtr verb = kj::toCharSequence(method).begin();
    const std::string_view name(verb.begin(), verb.size());
    if (!is_socket) {
      const auto refusal = refuse_router({.method = name, .target = url, .body = body},
                                         value_of(headers, authorization_));
      if (refusal) return error_reply(refusal->status, refusal->why);
    }
    auto query = read_router_query(name, url, body);
    if (!query) {
      return error_reply(query.error().code == Errc::kRefused ? 405 : 400, query.error().detail);
    }
    const RouterQuery::Kind kind = query->kind;
    auto question = std::make_shared<AdminQuestion>();
    question->kind = AdminQuestion::Kind::kRouter;
    question->router = std::move(*query);
    if (kind == RouterQuery::Kind::kJournal) {
      return in_time(server_.options_.answer_timeout + kLongestWait,
                     ask(std::move(*question), readers_, HttpServer::kReaders));
    }
    // The parts of a list follow each other at a bounded rate.
    const auto pause = kind == RouterQuery::Kind::kBlocks ? kPauseOfLists : 0 * kj::MILLISECONDS;
    return in_time(server_.options_.answer_timeout,
                   turns_.next().then([this, question, pause](kj::Own<HttpTurns::Turn>&& turn) {
                     return timer()
                         .afterDelay(pause)
                         .then([this, question]() { return ask(std::move(*question)); })
                         .attach(kj::mv(turn));
                   }));
  }

  [[nodiscard]] std::optional<PostRefusal> refuse_router(
      const cluster::PeerSecret::HttpRequest& request,
      std::optional<std::string_view> authorization) {
    if (!routers_) return PostRefusal{403, "this page is for routers, and this server has none"};
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return routers_->refuse(
        request, authorization,
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count()),
        clock_.now());
  }

  kj::Promise<Reply> in_time(Duration limit, kj::Promise<Reply>&& reply) {
    return timer()
        .timeoutAfter(limit.count() * kj::NANOSECONDS, kj::mv(reply))
        .catch_([](kj::Exception&& problem) {
          return error_reply(503, "the RPC thread did not respond: " + error_from(problem).detail);
        });
  }

  // ---- other pages

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
    return ask(std::move(question), asked_, HttpServer::kQuestions);
  }

  /// `places`: where the answer is waited for, by no more than `limit`.
  kj::Promise<Reply> ask(AdminQuestion question, Asked& places, std::size_t limit) {
    if (!health_.is_ok) return error_reply(503, "the server is not ready: " + health_.status);
    const std::uint64_t ticket = ++last_ticket_;
    question.ticket = ticket;
    if (places.size() >= limit || !server_.questions_.try_send(std::move(question))) {
      return error_reply(503, "too many requests at once");
    }
    auto answer = kj::newPromiseAndFulfiller<AdminAnswer>();
    places.emplace(ticket, kj::mv(answer.fulfiller));
    return answer.promise.then([this](AdminAnswer&& told) {
      HttpCounters counters = connections_.counters();
      if (routers_) counters.refused_routers = routers_->refused();
      return reply_of(std::move(told), counters);
    });
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
  std::optional<RouterGuard> routers_;
  SteadyClock clock_;
  Asked asked_;
  Asked readers_;  ///< Questions about the journal.
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
