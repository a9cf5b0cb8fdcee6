#include "router/client_connection.h"

#include <algorithm>
#include <array>
#include <utility>

#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

#include "router/exchange/exchange.h"
#include "router/http/cors.h"
#include "router/http/log.h"
#include "router/page/pages.h"

namespace pegaflow::router {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

/// The time limit for the first byte of a new connection during shutdown, and for a client to send
/// data that is discarded.
constexpr std::chrono::seconds kGrace(1);

/// Shared by all connections, like the buffer in upstream.cpp.
std::array<char, std::size_t{64} * 1024>& read_buffer() {
  static std::array<char, std::size_t{64} * 1024> buffer;
  return buffer;
}

/// The CORS lines of a response to an incomplete request.
std::string cors_of(const RequestParser& parser, const RouterOptions& options) {
  const HttpFields& fields = parser.head().fields;
  return parser.has_head() || find_field(fields, "origin") != nullptr
             ? cors_lines(options.cors_origins, fields)
             : cors_lines_without_head(options.cors_origins);
}

}  // namespace

std::string address_of(const tcp::socket& socket) {
  error_code ec;
  asio::ip::address address = socket.remote_endpoint(ec).address();
  if (ec) return {};
  if (address.is_v6() && address.to_v6().is_v4_mapped()) {
    address = asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
  }
  if (address.is_v4()) return address.to_string();
  const auto bytes = address.to_v6().to_bytes();
  return {bytes.begin(), bytes.begin() + 8};
}

ClientConnection::ClientConnection(tcp::socket socket, Shared& shared)
    : socket_(std::move(socket)),
      shared_(shared),
      deadline_(shared.deadlines, [this] { deadline_over(); }) {
  ++shared_.metrics.connections;
}

ClientConnection::~ClientConnection() {
  --shared_.metrics.connections;
  shared_.metrics.body_bytes -= body_bytes_;
}

void ClientConnection::release_body() noexcept {
  shared_.metrics.body_bytes -= std::exchange(body_bytes_, 0);
}

void ClientConnection::close() {
  error_code ignored;
  socket_.close(ignored);
}

void ClientConnection::deadline_over() {
  error_code ignored;
  if (is_reading_) {
    socket_.cancel(ignored);  // receive() fails, and the connection remains for the response.
  } else {
    close();
  }
}

bool ClientConnection::has_unread() const {
  error_code ec;
  return !received_.empty() || socket_.available(ec) > 0;
}

void ClientConnection::drain() {
  if (!is_idle_) return;
  if (is_new_ || has_unread()) {
    deadline_.set(std::min<Duration>(shared_.options.client_timeout, kGrace));
  } else {
    abort();
  }
}

void ClientConnection::abort() {
  is_gone_ = true;
  close();
  if (on_gone_) on_gone_();
}

asio::awaitable<void> ClientConnection::run() {
  error_code ignored;
  socket_.non_blocking(true, ignored);
  socket_.set_option(tcp::no_delay(true), ignored);
  bool more = true;
  do {
    more = co_await serve_one();
    is_idle_ = true;
    release_body();
  } while (more && !is_last_ && (!shared_.is_draining || has_unread()));
  if (has_unread()) co_await linger();
  close();
}

asio::awaitable<bool> ClientConnection::receive() {
  error_code ec;
  std::size_t got = 0;
  do {
    co_await socket_.async_wait(tcp::socket::wait_read,
                                asio::redirect_error(asio::use_awaitable, ec));
    if (!ec) got = socket_.read_some(asio::buffer(read_buffer()), ec);
  } while (ec == asio::error::would_block || ec == asio::error::try_again);
  if (ec) co_return false;
  received_.append(read_buffer().data(), got);
  co_return true;
}

Result<void> ClientConnection::feed(RequestParser& parser) {
  std::size_t used = 0;
  const bool had_head = parser.has_head();
  while (used < received_.size() && !parser.is_complete() && parser.has_head() == had_head) {
    PEGA_TRY_LET(const std::size_t step, parser.feed(std::string_view(received_).substr(used)));
    used += step;
    if (step == 0) break;
  }
  if (used == received_.size()) {
    std::string().swap(received_);  // An idle connection holds no buffer.
  } else {
    received_.erase(0, used);
  }
  return {};
}

asio::awaitable<bool> ClientConnection::send(std::string_view first, std::string_view second) {
  if (is_gone_) co_return false;
  error_code ec;
  deadline_.set(shared_.options.client_timeout);
  const std::array<asio::const_buffer, 2> both = {asio::buffer(first.data(), first.size()),
                                                  asio::buffer(second.data(), second.size())};
  co_await asio::async_write(socket_, both, asio::redirect_error(asio::use_awaitable, ec));
  deadline_.clear();
  if (ec) is_gone_ = true;
  co_return !ec;
}

void ClientConnection::watch(std::function<void()> on_gone) {
  on_gone_ = std::move(on_gone);
  ++watch_;
  if (received_.empty()) look_again();
}

void ClientConnection::look_again() {
  socket_.async_wait(tcp::socket::wait_read, [self = shared_from_this(),
                                              watch = watch_](const error_code& ec) {
    if (watch != self->watch_ || ec == asio::error::operation_aborted) return;
    char byte = 0;
    const ssize_t got = ::recv(self->socket_.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got > 0) return;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      self->look_again();
      return;
    }
    self->is_gone_ = true;
    if (self->on_gone_) self->on_gone_();
  });
}

void ClientConnection::unwatch() {
  ++watch_;
  on_gone_ = nullptr;
  error_code ignored;
  socket_.cancel(ignored);
}

asio::awaitable<void> ClientConnection::linger() {
  // Closing with unread bytes would reset the connection, and the client would lose the response.
  error_code ec;
  socket_.shutdown(tcp::socket::shutdown_send, ec);
  deadline_.set(kGrace);
  std::size_t discarded = 0;
  while (discarded < std::size_t{16} * 1024 * 1024) {
    received_.clear();
    if (!co_await receive()) break;
    discarded += received_.size();
  }
  deadline_.clear();
  received_.clear();
}

asio::awaitable<void> ClientConnection::refuse(const RequestParser& parser) {
  ++shared_.metrics.bad_requests;
  const unsigned status = parser.error_status();
  const std::string answer = error_response(status,
                                            status == 413   ? "the body is too large"
                                            : status == 431 ? "the head is too large"
                                                            : "the request is not valid HTTP/1.1",
                                            false, cors_of(parser, shared_.options), false);
  co_await send(answer);
  co_await linger();
}

asio::awaitable<void> ClientConnection::time_out(const RequestParser& parser) {
  is_reading_ = false;
  ++shared_.metrics.slow_requests;
  co_await send(error_response(408, "the request took too long to arrive", false,
                               cors_of(parser, shared_.options), false));
  co_await linger();
}

Duration ClientConnection::body_patience(std::size_t received, Duration passed) const {
  const RouterOptions& options = shared_.options;
  Duration left = std::min(options.client_timeout, options.body_timeout - passed);
  if (options.min_body_rate > 0) {
    const std::chrono::duration<double> earned(static_cast<double>(received) /
                                               static_cast<double>(options.min_body_rate));
    left = std::min(left,
                    options.client_timeout + std::chrono::duration_cast<Duration>(earned) - passed);
  }
  return std::max(left, Duration::zero());
}

asio::awaitable<bool> ClientConnection::read_body(RequestParser& parser) {
  const TimePoint began = shared_.now();
  deadline_.set(body_patience(0, Duration::zero()));
  is_reading_ = true;
  std::size_t before = 0;
  while (!parser.is_complete()) {
    const Result<void> fed = feed(parser);
    const std::uint64_t grown = parser.body_size() - before;
    before = parser.body_size();
    shared_.metrics.body_bytes += grown;
    body_bytes_ += grown;
    if (!fed) {
      is_reading_ = false;
      co_await refuse(parser);
      co_return false;
    }
    if (shared_.metrics.body_bytes > shared_.options.body_memory_bytes) {
      ++shared_.metrics.memory_refused;
      is_reading_ = false;
      (void)parser.take_body();
      release_body();
      co_await send(error_response(503, "the router's memory for request bodies is full", false,
                                   "Retry-After: 1\r\n" + cors_of(parser, shared_.options), false));
      co_await linger();
      co_return false;
    }
    if (parser.is_complete()) break;
    const bool received = co_await receive();
    if (!received || deadline_.is_over()) {
      if (deadline_.is_over()) co_await time_out(parser);
      co_return false;
    }
    deadline_.set(body_patience(parser.body_size() + received_.size(), shared_.now() - began));
  }
  is_reading_ = false;
  deadline_.clear();
  co_return true;
}

asio::awaitable<bool> ClientConnection::read_head(RequestParser& parser) {
  // For the whole head: bytes do not extend it.
  deadline_.set(shared_.is_draining ? std::min<Duration>(shared_.options.client_timeout, kGrace)
                                    : shared_.options.client_timeout);
  is_reading_ = true;
  while (!parser.has_head()) {
    if (!received_.empty()) {
      if (!feed(parser)) {
        is_reading_ = false;
        co_await refuse(parser);
        co_return false;
      }
      if (parser.has_head()) break;
      if (parser.has_begun() || !received_.empty()) is_idle_ = is_new_ = false;
    }
    const bool received = co_await receive();
    if (!received || deadline_.is_over()) {
      is_reading_ = false;
      if (deadline_.is_over() && !is_idle_) co_await time_out(parser);
      co_return false;
    }
  }
  is_reading_ = is_idle_ = is_new_ = false;
  deadline_.clear();
  co_return true;
}

asio::awaitable<bool> ClientConnection::serve_one() {
  RequestParser parser({static_cast<std::size_t>(shared_.options.max_header_bytes),
                        static_cast<std::size_t>(shared_.options.max_body_bytes)});
  if (!co_await read_head(parser)) co_return false;
  Exchange exchange(*this, shared_, parser.head());
  bool keeps = parser.head().keep_alive && !parser.head().is_http_10;
  // A request that can be refused by its head is refused before its body is read.
  const std::string refusal = exchange.refusal();
  if (!refusal.empty()) {
    exchange.finished();
    if (!co_await send(refusal)) co_return false;
    if (!parser.is_complete()) {
      co_await linger();
      co_return false;
    }
    co_return keeps;
  }
  if (!parser.is_complete()) {
    if (parser.head().wants_continue && received_.empty()) {
      constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
      if (!co_await send(kContinue)) co_return false;
    }
    if (!co_await read_body(parser)) co_return false;
  }
  keeps = co_await exchange.run(parser.take_body()) && keeps;
  exchange.finished();
  if (is_gone_) g_log.debug("a client left before the end of its response");
  co_return keeps && !is_gone_;
}

}  // namespace pegaflow::router
