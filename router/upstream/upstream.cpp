#include "router/upstream/upstream.h"

#include <algorithm>
#include <array>
#include <utility>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <fmt/format.h>

#include "router/http/http_error.h"
#include "router/upstream/engine_connections.h"

namespace pegaflow::router {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

/// One receive buffer for all connections: its content is parsed before another coroutine can run,
/// so an idle stream holds no buffer.
std::array<char, UpstreamCall::kReadBytes>& read_buffer() {
  static std::array<char, UpstreamCall::kReadBytes> buffer;
  return buffer;
}

Duration time_until(TimePoint end) {
  return std::max<Duration>(end - std::chrono::steady_clock::now(), Duration::zero());
}

/// Detects a peer whose machine is gone, which does not even send a reset.
void enable_keepalive(tcp::socket& socket) {
  error_code ignored;  // Deadlines apply without these options, too.
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(asio::socket_base::keep_alive(true), ignored);
  const int fd = socket.native_handle();
  const int idle_s = 15;
  const int interval_s = 5;
  const int count = 3;
  const unsigned unacknowledged_ms = 30'000;
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms,
                     sizeof(unacknowledged_ms));
}

}  // namespace

UpstreamCall::UpstreamCall(EngineConnections& connections, std::shared_ptr<Engine> engine)
    : connections_(connections),
      engine_(std::move(engine)),
      deadline_(connections.deadlines(),
                [this] {
                  error_code ignored;
                  if (socket_) socket_->close(ignored);
                }),
      cancelled_(!connections.add(*this)) {}

UpstreamCall::~UpstreamCall() {
  connections_.remove(*this);
  if (!socket_ || !socket_->is_open() || cancelled_) return;
  if (parser_.is_complete() && parser_.head().keep_alive && unparsed_.empty()) {
    connections_.give_back(*engine_, std::move(socket_));
  }
}

void UpstreamCall::cancel() {
  cancelled_ = true;
  if (stop_resolving_) stop_resolving_();
  error_code ignored;
  if (socket_) socket_->close(ignored);
}

void UpstreamCall::give_up() {
  given_up_ = true;
  cancel();
}

Error UpstreamCall::failure(Error error) const {
  if (given_up_) return {Errc::kGone, engine_->url.text + ": its health checks fail"};
  if (cancelled_) return {Errc::kCancelled, "the caller left"};
  if (deadline_.is_over()) return {Errc::kTimeout, "no response in time from " + engine_->url.text};
  error.detail = engine_->url.text + ": " + error.detail;
  return error;
}

asio::awaitable<Result<void>> UpstreamCall::connect(TimePoint end) {
  // All addresses of a name belong to one engine: when one refuses, the next one is tried.
  error_code ec = asio::error::host_not_found;
  std::vector<tcp::endpoint> endpoints = connections_.endpoints(*engine_);
  if (endpoints.empty()) {  // No health check has resolved the name yet.
    asio::steady_timer timer(connections_.io());
    stop_resolving_ = [&timer] { timer.cancel(); };
    const Result<void> resolved = co_await connections_.resolve(
        engine_, timer,
        std::min<Duration>(connections_.options().connect_timeout, time_until(end)));
    stop_resolving_ = nullptr;
    if (!resolved && !cancelled_) {
      co_return Result<void>(fail(Errc::kRefused, "{}", resolved.error().detail));
    }
    endpoints = connections_.endpoints(*engine_);
  }
  for (const tcp::endpoint& endpoint : endpoints) {
    socket_ = std::make_unique<EngineSocket>(connections_.io());
    deadline_.set(std::min<Duration>(connections_.options().connect_timeout, time_until(end)));
    co_await socket_->async_connect(endpoint, asio::redirect_error(asio::use_awaitable, ec));
    if (!ec || cancelled_) break;
  }
  if (cancelled_) co_return Result<void>(fail(Errc::kCancelled, "the client left"));
  if (ec) {
    const bool late = deadline_.is_over();
    deadline_.clear();
    socket_.reset();
    // kRefused for every cause: nothing was sent.
    co_return Result<void>(fail(Errc::kRefused, "connect to {}: {}", engine_->url.text,
                                late ? "timed out" : ec.message()));
  }
  ++engine_->counters.connects;
  socket_->non_blocking(true, ec);
  enable_keepalive(*socket_);
  co_return Result<void>();
}

asio::awaitable<Result<void>> UpstreamCall::receive(std::string& out) {
  error_code ec;
  std::size_t got = 0;
  do {
    co_await socket_->async_wait(tcp::socket::wait_read,
                                 asio::redirect_error(asio::use_awaitable, ec));
    if (!ec) got = socket_->read_some(asio::buffer(read_buffer()), ec);
  } while (ec == asio::error::would_block || ec == asio::error::try_again);
  if (ec == asio::error::eof) {
    auto ended = parser_.feed_end();
    if (ended) {
      error_code ignored;
      socket_->close(ignored);
    }
    co_return ended;
  }
  if (ec) co_return Result<void>(fail_socket(ec, "receive"));
  received_ = true;
  std::string_view bytes(read_buffer().data(), got);
  std::string joined;
  if (!unparsed_.empty()) {
    joined = std::exchange(unparsed_, {});
    joined.append(bytes);
    bytes = joined;
  }
  while (!bytes.empty() && !parser_.is_complete()) {
    const auto used = parser_.feed(bytes, out);
    if (!used) co_return Result<void>(tl::unexpected<Error>(used.error()));
    bytes.remove_prefix(*used);
    if (*used == 0) break;
  }
  unparsed_ = bytes;
  co_return Result<void>();
}

asio::awaitable<Result<void>> UpstreamCall::send_and_read_head(const std::string& head,
                                                               std::string_view body) {
  error_code ec;
  const std::array<asio::const_buffer, 2> request = {asio::buffer(head),
                                                     asio::buffer(body.data(), body.size())};
  co_await asio::async_write(*socket_, request, asio::redirect_error(asio::use_awaitable, ec));
  if (ec) co_return Result<void>(fail_socket(ec, "send"));
  was_sent_ = true;
  while (!parser_.has_head()) {
    Result<void> got = co_await receive(first_body_);
    if (!got) co_return got;
  }
  co_return Result<void>();
}

asio::awaitable<Result<void>> UpstreamCall::open(std::string head, std::string_view body,
                                                 Duration timeout, Resend resend) {
  ++engine_->counters.requests;
  const TimePoint end = std::chrono::steady_clock::now() + timeout;
  while (true) {
    if (cancelled_) co_return Result<void>(tl::unexpected<Error>(failure({})));
    socket_ = resend != Resend::kNever ? connections_.take(*engine_) : nullptr;
    const bool reused = socket_ != nullptr;
    if (!reused) {
      Result<void> connected = co_await connect(end);
      if (!connected) co_return connected;
    }
    deadline_.set(time_until(end));
    Result<void> done = co_await send_and_read_head(head, body);
    if (done) {
      deadline_.clear();
      co_return done;
    }
    // The engine may have closed the pooled connection in this moment.
    const bool may_resend = resend == Resend::kAlways || !was_sent_;
    if (reused && may_resend && !received_ && !cancelled_ && !deadline_.is_over()) continue;
    co_return Result<void>(tl::unexpected<Error>(failure(std::move(done.error()))));
  }
}

asio::awaitable<Result<void>> UpstreamCall::more(std::string& out, Duration timeout) {
  if (!first_body_.empty()) {
    out += first_body_;
    std::string().swap(first_body_);
    co_return Result<void>();
  }
  const std::size_t before = out.size();
  deadline_.set(timeout);
  while (out.size() == before && !parser_.is_complete()) {
    if (!socket_->is_open()) {
      co_return Result<void>(
          tl::unexpected<Error>(failure({Errc::kPeerLost, "the connection is closed"})));
    }
    Result<void> got = co_await receive(out);
    if (!got) co_return Result<void>(tl::unexpected<Error>(failure(std::move(got.error()))));
  }
  deadline_.clear();
  co_return Result<void>();
}

std::string request_head(const Engine& engine, std::string_view method, std::string_view target,
                         std::string_view bearer, std::size_t body_bytes) {
  std::string head = fmt::format("{} {} HTTP/1.1\r\nHost: {}\r\n", method, target,
                                 std::string_view(engine.url.text).substr(7));
  if (!bearer.empty()) head += fmt::format("Authorization: Bearer {}\r\n", bearer);
  if (body_bytes > 0) {
    head += fmt::format("Content-Type: application/json\r\nContent-Length: {}\r\n", body_bytes);
  }
  return head + "\r\n";
}

std::string get_head(const Engine& engine, std::string_view target, std::string_view bearer) {
  return request_head(engine, "GET", target, bearer, 0);
}

asio::awaitable<Result<ShortResponse>> get_from_engine(EngineConnections& connections,
                                                       std::shared_ptr<Engine> engine,
                                                       std::string head, Duration timeout,
                                                       std::size_t limit) {
  return ask_engine(connections, std::move(engine), std::move(head), {}, timeout, limit);
}

asio::awaitable<Result<ShortResponse>> ask_engine(EngineConnections& connections,
                                                  std::shared_ptr<Engine> engine, std::string head,
                                                  std::string_view body, Duration timeout,
                                                  std::size_t limit) {
  UpstreamCall call(connections, std::move(engine));
  co_return co_await ask_engine(call, std::move(head), body, timeout, limit);
}

asio::awaitable<Result<ShortResponse>> ask_engine(UpstreamCall& call, std::string head,
                                                  std::string_view body, Duration timeout,
                                                  std::size_t limit) {
  const TimePoint end = std::chrono::steady_clock::now() + timeout;
  Result<void> done = co_await call.open(std::move(head), body, timeout, Resend::kAlways);
  ShortResponse answer;
  while (done && !call.is_complete() && answer.body.size() <= limit) {
    done = co_await call.more(answer.body, time_until(end));
  }
  // Body bytes that arrived with the head are pending even when the response is complete.
  if (done) done = co_await call.more(answer.body, time_until(end));
  if (!done) co_return Result<ShortResponse>(tl::unexpected<Error>(std::move(done.error())));
  if (answer.body.size() > limit) {
    co_return Result<ShortResponse>(fail(Errc::kOutOfCapacity, "the response is too long"));
  }
  answer.status = call.head().status;
  co_return Result<ShortResponse>(std::move(answer));
}

}  // namespace pegaflow::router
