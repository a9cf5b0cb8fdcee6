#include "router/watch/replica_watch.h"

#include <chrono>
#include <ctime>
#include <span>
#include <utility>
#include <vector>

#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <fmt/format.h>

#include "router/http/log.h"
#include "router/kv/kv_routing.h"
#include "router/replicas/snapshot.h"

namespace pegaflow::router {

namespace asio = boost::asio;
using boost::system::error_code;

namespace {

/// Messages and bytes in one event-loop iteration.
constexpr int kMessages = 16;
constexpr std::size_t kBytes = std::size_t{64} << 10U;
/// A connection without a message for so long is made anew.
constexpr Duration kRenew = std::chrono::seconds(10);
constexpr Duration kSnapshotStep = std::chrono::seconds(10);
constexpr int kSnapshotAttempts = 10;
/// A snapshot is read once the engines' replays have ended, or after this time.
constexpr Duration kSettling = std::chrono::seconds(10);

std::uint64_t unix_ms() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

}  // namespace

Result<std::unique_ptr<ReplicaWatch>> ReplicaWatch::open(Shared& shared) {
  auto socket = ReplicaSocket::open(shared.options.replica_listen);
  if (!socket) return fail(socket.error().code, "--replica-listen: {}", socket.error().detail);
  PEGA_TRY_LET(const std::vector<EngineUrl> urls, shared.options.replica_urls());
  std::unique_ptr<ReplicaWatch> watch(new ReplicaWatch(shared, std::move(*socket)));
  EngineList list;
  list.by_role[0] = urls;
  watch->names_.set(std::move(list));
  return watch;
}

ReplicaWatch::ReplicaWatch(Shared& shared, std::unique_ptr<ReplicaSocket> socket)
    : shared_(shared),
      socket_(std::move(socket)),
      replicas_(*shared.kv, shared.secrets,
                {.router = Id128::random(),
                 .publish = [this](std::string_view text) { return socket_->publish(text); },
                 .on_pending =
                     [this] {
                       if (std::exchange(is_flushing_, true)) return;
                       asio::post(shared_.io, [this] {
                         is_flushing_ = false;
                         replicas_.flush();
                       });
                     },
                 .on_placements =
                     [this] {
                       for (const auto& call : shared_.on_placements) call();
                     },
                 .unix_ms = unix_ms}),
      names_(
          shared.io, [this] { use_addresses(); },
          [this](const std::string& sentence) {
            ++shared_.metrics.name_errors;
            if (!sentence.empty()) g_log.warn("a name could not be resolved: {}", sentence);
          }),
      timer_(shared.io) {
  shared_.replicas = &replicas_;
}

ReplicaWatch::~ReplicaWatch() { shared_.replicas = nullptr; }

void ReplicaWatch::start(std::uint16_t http_port) {
  // Snapshots are for those who have the secret.
  if (shared_.secrets) {
    replicas_.set_http_port(http_port);
  } else {
    replicas_.snapshot() = {.state = "off", .reason = "it needs --peer-secret-file"};
  }
  began_ = shared_.now();
  use_addresses();
  watch_publisher();
  asio::co_spawn(shared_.io, keep_time(), asio::detached);
}

void ReplicaWatch::stop() {
  if (std::exchange(stopped_, true)) return;
  error_code ignored;
  for (const auto& [address, line] : lines_) line->ready.close(ignored);
  if (subscribers_) subscribers_->close(ignored);
  timer_.cancel();
  names_.stop();
}

void ReplicaWatch::use_addresses() {
  if (stopped_) return;
  std::vector<std::string> addresses;
  const EngineList list = names_.engines();
  for (const EngineUrl& url : list.by_role[0]) {
    addresses.push_back(url.text.substr(url.text.find("//") + 2));
  }
  replicas_.set_addresses(addresses, shared_.now());
  std::vector<std::string> closed;
  for (const auto& [address, line] : lines_) {
    if (!replicas_.siblings().contains(address)) closed.push_back(address);
  }
  for (const std::string& address : closed) close_line(address);
  for (const auto& [address, sibling] : replicas_.siblings()) {
    if (!lines_.contains(address) && sibling.state != Sibling::State::kSelf) connect(address);
  }
}

void ReplicaWatch::connect(const std::string& address) {
  const Result<int> fd = socket_->subscribe(address);
  const int copy = fd ? ::dup(*fd) : -1;
  if (copy < 0) {
    g_log.warn("another router's placements are not received replica={} why=\"{}\"", address,
               fd ? "no descriptor is free" : fd.error().detail);
    return;
  }
  auto line = std::make_shared<Line>(shared_.io);
  line->ready.assign(copy);
  line->opened = shared_.now();
  lines_[address] = line;
  asio::co_spawn(shared_.io, receive(address, std::move(line)), asio::detached);
}

void ReplicaWatch::close_line(const std::string& address) {
  const auto found = lines_.find(address);
  if (found == lines_.end()) return;
  error_code ignored;
  found->second->ready.close(ignored);
  lines_.erase(found);
  socket_->unsubscribe(address);
}

void ReplicaWatch::tend_lines() {
  const TimePoint now = shared_.now();
  for (const auto& [address, sibling] : replicas_.siblings()) {
    if (sibling.state == Sibling::State::kSelf) {
      close_line(address);
      continue;
    }
    const auto line = lines_.find(address);
    const bool is_due = line == lines_.end() ||
                        (now - line->second->opened >= kRenew && now - sibling.heard >= kRenew);
    if (!is_due) continue;
    close_line(address);
    connect(address);
  }
}

asio::awaitable<void> ReplicaWatch::receive(std::string address, std::shared_ptr<Line> line) {
  std::string message;
  const auto is_current = [&] {
    const auto found = lines_.find(address);
    return !stopped_ && found != lines_.end() && found->second == line;
  };
  while (is_current()) {
    std::size_t bytes = 0;
    bool has_more = true;
    for (int i = 0; i < kMessages && bytes < kBytes && has_more && is_current(); ++i) {
      has_more = socket_->receive(address, message);
      if (!has_more) break;
      bytes += message.size();
      replicas_.arrived(address, std::as_bytes(std::span(message)), shared_.now());
    }
    if (!is_current()) co_return;
    if (has_more) {
      co_await asio::post(shared_.io, asio::use_awaitable);  // Others get their turn.
      continue;
    }
    error_code ec;
    co_await line->ready.async_wait(Descriptor::wait_read,
                                    asio::redirect_error(asio::use_awaitable, ec));
    if (ec) co_return;
  }
}

void ReplicaWatch::watch_publisher() {
  error_code ignored;
  if (subscribers_) subscribers_->close(ignored);
  subscribers_.reset();
  const int fd = socket_->publisher_fd();
  const int copy = fd < 0 ? -1 : ::dup(fd);
  if (copy < 0) return;
  subscribers_ = std::make_shared<Descriptor>(shared_.io, copy);
  asio::co_spawn(shared_.io, serve_subscribers(subscribers_), asio::detached);
}

asio::awaitable<void> ReplicaWatch::serve_subscribers(std::shared_ptr<Descriptor> ready) {
  while (!stopped_ && ready == subscribers_) {
    if (socket_->serve()) {
      g_log.warn("strangers subscribe at --replica-listen, which is opened anew address={}",
                 address());
      watch_publisher();
      co_return;
    }
    error_code ec;
    co_await ready->async_wait(Descriptor::wait_read,
                               asio::redirect_error(asio::use_awaitable, ec));
    if (ec) co_return;
  }
}

asio::awaitable<void> ReplicaWatch::keep_time() {
  while (!stopped_) {
    names_.ask();
    if (socket_->serve()) watch_publisher();
    replicas_.tick(shared_.now());
    tend_lines();
    const bool is_settled = replicas_.is_settled() || shared_.now() - began_ >= kSettling;
    if (replicas_.snapshot().state == "waiting" && !is_loading_ && is_settled &&
        replicas_.best_source() != nullptr) {
      is_loading_ = true;
      asio::co_spawn(shared_.io, load_snapshot(), asio::detached);
    }
    error_code ignored;
    timer_.expires_after(ReplicaSet::kHeartbeat);
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

asio::awaitable<void> ReplicaWatch::load_snapshot() {
  const Sibling* const source = replicas_.best_source();
  if (source == nullptr) {
    is_loading_ = false;
    co_return;
  }
  ++snapshot_attempts_;
  ReplicaSet::Snapshot& shown = replicas_.snapshot();
  const Id128 from = source->last.router;
  const std::string host = source->address.substr(0, source->address.rfind(':'));
  const auto url = EngineUrl::parse(fmt::format("http://{}:{}", host, source->http_port));
  Result<void> read = url ? Result<void>() : Result<void>(tl::unexpected<Error>(url.error()));
  if (url) {
    shown.state = "loading";
    shown.reason = fmt::format("from {}", url->text);
    const auto place = std::make_shared<Engine>(*url, Role::kPrefill, Breaker::Options());
    read = co_await read_snapshot(place, from);
  }
  is_loading_ = false;
  if (stopped_) co_return;
  if (read) {
    shown.state = "done";
    g_log.info("started from another router's snapshot from={} texts={}", url->text, shown.texts);
    co_return;
  }
  const bool is_last = snapshot_attempts_ >= kSnapshotAttempts;
  shown.state = is_last ? "off" : "waiting";
  shown.reason = fmt::format("attempt {}: {}", snapshot_attempts_, read.error().detail);
  g_log.warn("another router's snapshot could not be read why=\"{}\"", shown.reason);
}

asio::awaitable<Result<void>> ReplicaWatch::read_snapshot(std::shared_ptr<Engine> place,
                                                          Id128 from) {
  const std::string nonce = to_string(Id128::random());
  const std::string target = fmt::format("{}?{}", kSnapshotPath, nonce);
  const std::string token = cluster::http_token(
      shared_.secrets->first(), {.time = static_cast<std::uint64_t>(std::time(nullptr)),
                                 .method = "GET",
                                 .target = target,
                                 .body = {}});
  UpstreamCall call(shared_.engine_connections, place);
  SnapshotReader reader(replicas_, nonce, from);
  auto opened =
      co_await call.open(get_head(*place, target, token), {}, kSnapshotStep, Resend::kNever);
  if (!opened) co_return opened;
  if (call.head().status != 200) {
    co_return fail(Errc::kRefused, "GET {} returned {}", kSnapshotPath, call.head().status);
  }
  std::string bytes;
  do {  // Also when the whole body came with the head.
    bytes.clear();
    auto more = co_await call.more(bytes, kSnapshotStep);
    if (!more) co_return more;
    auto fed = reader.feed(bytes, shared_.now());
    // An engine may have a million blocks: others get their turn between the slices.
    while (shared_.kv->fleet().adopt_more()) {
      co_await asio::post(shared_.io, asio::use_awaitable);
    }
    replicas_.snapshot().texts = reader.texts();
    replicas_.snapshot().engines = reader.engines();
    if (!fed) co_return fed;
  } while (!call.is_complete() && !stopped_);
  if (!reader.is_complete()) {
    co_return fail(Errc::kPeerLost, "the snapshot of {} ended after {} texts", place->url.text,
                   reader.texts());
  }
  co_return Result<void>();
}

}  // namespace pegaflow::router
