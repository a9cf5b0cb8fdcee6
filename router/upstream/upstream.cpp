#include "router/upstream/upstream.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

#include "router/http/http_error.h"

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

bool is_open_and_quiet(tcp::socket& socket) {
  char byte = 0;
  const ssize_t got = ::recv(socket.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
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

EngineConnections::EngineConnections(asio::io_context& io, Deadlines& deadlines,
                                     const Options& options)
    : io_(io), deadlines_(deadlines), options_(options) {}

std::unique_ptr<tcp::socket> EngineConnections::take(const Engine& engine) {
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

void EngineConnections::give_back(const Engine& engine, std::unique_ptr<tcp::socket> socket) {
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

void EngineConnections::give_up(const Engine& engine) {
  for (UpstreamCall* const call : calls_) {
    if (call->engine().get() == &engine) call->give_up();
  }
  idle_.erase(engine.url.text);
}

void EngineConnections::close_all() {
  is_closed_ = true;
  for (UpstreamCall* const call : calls_) call->cancel();
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

UpstreamCall::UpstreamCall(EngineConnections& connections, std::shared_ptr<Engine> engine)
    : connections_(connections),
      engine_(std::move(engine)),
      deadline_(connections.deadlines(),
                [this] {
                  error_code ignored;
                  if (socket_) socket_->close(ignored);
                }),
      cancelled_(connections.is_closed_) {
  connections_.calls_.insert(this);
}

UpstreamCall::~UpstreamCall() {
  connections_.calls_.erase(this);
  if (!socket_ || !socket_->is_open() || cancelled_) return;
  if (parser_.is_complete() && parser_.head().keep_alive && unparsed_.empty()) {
    connections_.give_back(*engine_, std::move(socket_));
  }
}

void UpstreamCall::cancel() {
  cancelled_ = true;
  if (resolving_ != nullptr) resolving_->cancel();
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
    resolving_ = &timer;
    const Result<void> resolved = co_await connections_.resolve(
        engine_, timer,
        std::min<Duration>(connections_.options().connect_timeout, time_until(end)));
    resolving_ = nullptr;
    if (!resolved && !cancelled_) {
      co_return Result<void>(fail(Errc::kRefused, "{}", resolved.error().detail));
    }
    endpoints = connections_.endpoints(*engine_);
  }
  for (const tcp::endpoint& endpoint : endpoints) {
    socket_ = std::make_unique<tcp::socket>(connections_.io());
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
    first_body_ = std::string();
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

asio::awaitable<Result<ShortResponse>> get_from_engine(EngineConnections& connections,
                                                       std::shared_ptr<Engine> engine,
                                                       std::string head, Duration timeout,
                                                       std::size_t limit) {
  const TimePoint end = std::chrono::steady_clock::now() + timeout;
  UpstreamCall call(connections, engine);
  Result<void> done = co_await call.open(std::move(head), {}, timeout, Resend::kAlways);
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
