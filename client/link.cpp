#include "client/link.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/units.h"
#include "capnp/wire/carried_descriptor.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/rpc_connection.h"
#include "capnp/wire/rpc_error.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"link"};

/// The default, 208 KiB, is smaller than a lookup of 8,192 keys.
constexpr int kSocketBufferBytes = 1 << 20;

/// KJ queues what a stopped server does not read. Beyond the first limit the client sends no
/// requests; calls that clean up, which are few and small, never reach the second.
constexpr std::size_t kMaxQueuedToAsk = std::size_t{4} << 20;
constexpr std::size_t kMaxQueued = std::size_t{16} << 20;

/// The answer to openNext carries the most: the guards, the pidfd and the allocations of another
/// engine.
constexpr unsigned kFdsPerMessage = 3;

/// A connect to a Unix socket never waits: it succeeds, or fails with the reason.
Result<UniqueFd> connect_to(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return fail_errno(errno, "create a Unix socket");
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &kSocketBufferBytes, sizeof kSocketBufferBytes);
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVBUF, &kSocketBufferBytes, sizeof kSocketBufferBytes);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  PEGA_ASSERT(path.size() < sizeof address.sun_path, "{} was validated", path);
  std::memcpy(address.sun_path, path.data(), path.size());
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    // EAGAIN: the queue of connections is full, since the server accepts none.
    return fail(Errc::kPeerLost, "connect to {}: {}", path, std::strerror(errno));
  }
  return socket;
}

/// The result of hello().
/// A connection to a socket without a server costs microseconds: while one may be restarting, the
/// next attempt comes soon.
constexpr Duration kRestartTime = std::chrono::seconds(10);
constexpr Duration kRestartInterval = std::chrono::milliseconds(25);

struct Welcome {
  Id128 server;
  Id128 connection;
  std::string build;
  wire::Session::Client session;
  std::uint16_t version = 0;
  std::uint64_t features = 0;
};

std::string to_std(capnp::Text::Reader text) { return {text.begin(), text.size()}; }

Result<Welcome> read_welcome(capnp::Response<wire::Gate::HelloResults>& answer,
                             std::uint16_t minimum, std::uint16_t maximum) {
  const std::string build = to_std(answer.getBuild());
  if (answer.getVersion() == 0) {
    Error error = read_error(answer.getRefused());
    if (answer.getMaximum() < minimum || answer.getMinimum() > maximum) {
      error.code = Errc::kRefused;
      error.detail = fmt::format(
          "the server ({}) speaks versions {} to {} and this client {} to {}: upgrade the {}",
          build, answer.getMinimum(), answer.getMaximum(), minimum, maximum,
          answer.getMaximum() < minimum ? "server" : "client");
    }
    return tl::unexpected<Error>(std::move(error));
  }
  if (answer.getVersion() < minimum || answer.getVersion() > maximum || !answer.hasSession()) {
    return fail(Errc::kInternal, "the server ({}) chose version {} of {} to {}", build,
                answer.getVersion(), minimum, maximum);
  }
  return Welcome{read_id(answer.getServer()),
                 read_id(answer.getConnection()),
                 build,
                 answer.getSession(),
                 answer.getVersion(),
                 answer.getFeatures()};
}

bool is_tried_again_soon(Errc code) {
  return code == Errc::kPeerLost || code == Errc::kTimeout || code == Errc::kBusy;
}

}  // namespace

/// The state of one connection; destroyed from the last to the first.
struct Link::Connection {
  Connection(kj::AsyncIoContext& io, UniqueFd socket, Id128 last)
      : fd(socket.get()),
        previous(last),
        rpc(io.lowLevelProvider->wrapUnixSocketFd(
                socket.release(), kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP |
                                      kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC |
                                      kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK),
            kFdsPerMessage) {}

  const int fd;
  const Id128 previous;  ///< The connection whose end hello reports.
  RpcConnection rpc;
  kj::Maybe<wire::Session::Client> session;
  std::uint16_t version = 0;
  std::uint64_t features = 0;
  bool ready = false;
  kj::Own<kj::PromiseFulfiller<void>> breaker_opened;
  std::optional<Error> why_dropped;
};

Link::Link(kj::AsyncIoContext& io, const LinkOptions& options, const Identity& identity,
           StatusBoard& board, Role& role)
    : io_(io),
      options_(options),
      identity_(identity),
      minimum_(options.minimum_version != 0 ? options.minimum_version : kWireMinimum),
      maximum_(options.maximum_version != 0 ? options.maximum_version : kWireMaximum),
      board_(board),
      role_(role),
      breaker_(clock_, options.breaker_failures, options.breaker_window),
      close_requested_(kj::newPromiseAndFulfiller<void>()),
      closed_(close_requested_.promise.fork()) {}

Link::~Link() noexcept(false) = default;

kj::Promise<void> Link::run() {
  if (closing_) return kj::READY_NOW;
  return attempt().then([this] { return pause(); }).then([this] { return run(); });
}

void Link::close() {
  closing_ = true;
  close_requested_.fulfiller->fulfill();
}

kj::Promise<void> Link::attempt() {
  Result<UniqueFd> socket = connect_to(options_.socket_path);
  if (!socket) {
    say(LinkState::kConnecting, to_string(socket.error()));
    pause_ = soon_again();
    return kj::READY_NOW;
  }
  connection_ = std::make_unique<Connection>(io_, std::move(*socket), previous_connection_);
  kj::Promise<Result<void>> lost = connection_->rpc.on_over().then([this]() -> Result<void> {
    if (connection_->why_dropped) return tl::unexpected<Error>(*connection_->why_dropped);
    return fail(Errc::kPeerLost, "the server closed the connection");
  });
  return say_hello()
      .then([this](Result<void>&& hello) -> kj::Promise<Result<void>> {
        if (!hello) return kj::mv(hello);
        return role_.begin();
      })
      .then([this](Result<void>&& begun) -> kj::Promise<Result<void>> {
        if (!begun) return kj::mv(begun);
        connection_->ready = true;
        breaker_.close();
        say(LinkState::kReady, "");
        return serve();
      })
      .exclusiveJoin(kj::mv(lost))
      .exclusiveJoin(closed_.addBranch().then([] { return Result<void>(); }))
      .then([this](Result<void>&& outcome) { return finish(outcome); });
}

kj::Promise<Result<void>> Link::say_hello() {
  auto request = connection_->rpc.bootstrap<wire::Gate>().helloRequest();
  request.setMinimum(minimum_);
  request.setMaximum(maximum_);
  if (maximum_ >= kWireHasFeatures) request.setFeatures(kFeatures & options_.features);
  write_id(identity_.process, request.initProcess());
  write_id(connection_->previous, request.initPreviousConnection());
  request.setQuiesced(true);  // Role::end() of that connection has resolved.
  request.setBuild(options_.build.c_str());
  // The server watches the pidfd of this process to detect that it can no longer write to the pool,
  // which the end of a connection does not prove.
  if (identity_.pidfd >= 0) {
    request.setHandle(kj::heap<CarriedDescriptor<wire::ProcessHandle>>(identity_.pidfd));
  }
  return call(kj::mv(request), options_.connect_deadline, "hello",
              [this](auto& answer) { return read_welcome(answer, minimum_, maximum_); })
      .then([this](Result<Welcome>&& welcome) -> Result<void> {
        if (!welcome) return tl::unexpected<Error>(std::move(welcome.error()));
        previous_connection_ = welcome->connection;
        connection_->session = kj::mv(welcome->session);
        connection_->version = welcome->version;
        connection_->features =
            welcome->version >= kWireHasFeatures ? welcome->features & options_.features : 0;
        board_.set_server(welcome->server, std::move(welcome->build));
        return {};
      });
}

/// Runs while the link is ready: waits until the breaker opens, then probes until it closes.
kj::Promise<Result<void>> Link::serve() {
  auto opened = kj::newPromiseAndFulfiller<void>();
  connection_->breaker_opened = kj::mv(opened.fulfiller);
  return opened.promise.then([this] { return probe(); }).then([this] { return serve(); });
}

/// Sends one request at a time, so that nothing piles up before a stopped server. A late answer
/// does not close the breaker: the next probe shows whether the server is fast again.
kj::Promise<void> Link::probe() {
  return timer()
      .afterDelay(options_.breaker_probe_interval.count() * kj::NANOSECONDS)
      .then([this] {
        auto request = session().unclaimRequest();
        write_id(Id128{}, request.initToken());
        const TimePoint asked = clock_.now();
        return kj::Promise<capnp::Response<wire::Done>>(request.send())
            .then(
                [this, asked](auto&&) { return clock_.now() - asked <= options_.lookup_deadline; },
                [this](kj::Exception&& exception) {
                  on_exception(exception, "probe");
                  return false;
                });
      })
      .then([this](bool in_time) -> kj::Promise<void> {
        if (!in_time) return probe();
        breaker_.close();
        say(LinkState::kReady, "");
        return kj::READY_NOW;
      });
}

/// After any end of the connection, new requests fail first, then those in flight end, and only
/// then the next attempt begins.
kj::Promise<void> Link::finish(const Result<void>& outcome) {
  if (!closing_) {
    const Error& error = outcome.error();
    const bool soon = is_tried_again_soon(error.code);
    // A session that worked until now counts as lost, not as refused.
    if (connection_->ready) lost_since_ = clock_.now();
    pause_ = soon || connection_->ready ? soon_again() : options_.refused_interval;
    say(soon || connection_->ready ? LinkState::kConnecting : LinkState::kRefused,
        to_string(error));
    connection_ = nullptr;
  } else {
    say(LinkState::kRetired, "closed");
  }
  return role_.end().then([this] { return say_goodbye(); }).then([this] { connection_ = nullptr; });
}

kj::Promise<void> Link::say_goodbye() {
  if (!is_connected() || !is_up()) return kj::READY_NOW;
  // Without an answer the server learns the same from the end of this process.
  return call(session().goodbyeRequest(), options_.open_deadline, "goodbye",
              [](auto& answer) { return read_done(answer); })
      .then([](Result<void>&& done) {
        if (!done) kLog.debug("goodbye failed error=\"{}\"", to_string(done.error()));
      });
}

Duration Link::soon_again() const {
  const bool is_just_lost =
      lost_since_ != TimePoint::min() && clock_.now() - lost_since_ < kRestartTime;
  return is_just_lost ? std::min(options_.reconnect_interval, kRestartInterval)
                      : options_.reconnect_interval;
}

kj::Promise<void> Link::pause() {
  if (closing_) return kj::READY_NOW;
  return timer().afterDelay(pause_.count() * kj::NANOSECONDS).exclusiveJoin(closed_.addBranch());
}

void Link::say(LinkState state, std::string detail) {
  if (!board_.set(state, detail)) return;
  if (identity_.is_quiet) {
    kLog.debug("{} instance={} side={} detail=\"{}\"", to_string(state), options_.instance,
               identity_.side, detail);
    return;
  }
  switch (state) {
    case LinkState::kReady:
      kLog.info("the cache is in use instance={} side={} server=\"{}\"", options_.instance,
                identity_.side, board_.get().server_build);
      break;
    case LinkState::kConnecting:
      kLog.warn("continuing without the cache instance={} side={} error=\"{}\"", options_.instance,
                identity_.side, detail);
      break;
    case LinkState::kRefused:
      kLog.warn("the server refuses this client; retried every {} instance={} side={} error=\"{}\"",
                format_duration(options_.refused_interval), options_.instance, identity_.side,
                detail);
      break;
    case LinkState::kBroken:
      kLog.warn(
          "the server is too slow and receives only probes until it is faster instance={} side={} "
          "error=\"{}\"",
          options_.instance, identity_.side, detail);
      break;
    case LinkState::kRetired:
      kLog.debug("closed instance={} side={}", options_.instance, identity_.side);
      break;
  }
}

kj::Promise<void> Link::describe(const DeviceReport& device) {
  if (!server_has(kFeatureNotices)) return kj::READY_NOW;
  // The two enumerations are one: see link_options.h.
  static_assert(static_cast<int>(DeviceReport::Kernels::kNotNeeded) ==
                    static_cast<int>(wire::Engine::Kernels::NOT_NEEDED) &&
                static_cast<int>(DeviceReport::CopyPath::kStaged) ==
                    static_cast<int>(wire::Engine::CopyPath::STAGED));
  auto request = session().describeRequest();
  write_engine({.device = device.name,
                .kernels = static_cast<wire::Engine::Kernels>(device.kernels),
                .copy_path = static_cast<wire::Engine::CopyPath>(device.copy_path),
                .loads = options_.offers_loads,
                .saves = options_.offers_saves},
               request);
  return call(kj::mv(request), options_.connect_deadline, "describe",
              [](auto& answer) { return read_done(answer); })
      .then([](Result<void>&& done) {
        if (!done) kLog.debug("describe failed error=\"{}\"", to_string(done.error()));
      });
}

Result<void> Link::may_ask() const {
  if (connection_ == nullptr || !connection_->ready) return fail(Errc::kPeerLost, "no server");
  if (breaker_.is_open()) return fail(Errc::kPeerLost, "the server is too slow");
  const std::size_t queued = connection_->rpc.queued_bytes();
  if (queued > kMaxQueuedToAsk) {
    return fail(Errc::kBusy, "{} bytes are queued for the server already", queued);
  }
  return {};
}

Result<void> Link::may_send() {
  if (connection_ == nullptr) return fail(Errc::kPeerLost, "no server");
  const std::size_t queued = connection_->rpc.queued_bytes();
  if (queued <= kMaxQueued) return {};
  // A call that is not sent now would be lost, so the next connection reports everything at once.
  Error error{Errc::kPeerLost, fmt::format("the server has not read {} bytes", queued)};
  drop(error);
  return tl::unexpected<Error>(std::move(error));
}

bool Link::is_connected() const {
  return connection_ != nullptr && connection_->session != nullptr;
}

std::uint16_t Link::version() const { return connection_ == nullptr ? 0 : connection_->version; }

bool Link::server_has(std::uint64_t feature) const {
  return connection_ != nullptr && (connection_->features & feature) != 0;
}

bool Link::is_up() const {
  if (connection_ == nullptr) return false;
  pollfd wanted{connection_->fd, POLLRDHUP, 0};
  return ::poll(&wanted, 1, 0) >= 0 && (wanted.revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0;
}

void Link::drop(Error why) {
  if (connection_ == nullptr || connection_->why_dropped) return;
  connection_->why_dropped = std::move(why);
  connection_->rpc.drop();
}

wire::Session::Client& Link::session() {
  PEGA_ASSERT(is_connected(), "no session");
  KJ_IF_MAYBE (session, connection_->session) {
    return *session;
  }
  assertion_failed(__FILE__, __LINE__, "session", "connected without a session");
}

Error Link::on_exception(const kj::Exception& exception, const char* what) {
  Error error = error_from(exception);
  error.detail = fmt::format("{}: {}", what, error.detail);
  // Expected outcomes are values: after an exception this connection is unusable.
  if (error.code != Errc::kPeerLost) drop(error);
  return error;
}

Error Link::on_deadline_missed(const char* what, Duration deadline) {
  Error error{Errc::kTimeout,
              fmt::format("{}: no answer within {}", what, format_duration(deadline))};
  if (connection_ != nullptr && connection_->ready && breaker_.on_deadline_missed()) {
    say(LinkState::kBroken, error.detail);
    connection_->breaker_opened->fulfill();
  }
  return error;
}

}  // namespace pegaflow
