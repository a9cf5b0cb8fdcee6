#include "server/rpc/rpc_server.h"

#include <array>
#include <cerrno>
#include <optional>
#include <string>
#include <utility>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <capnp/rpc-twoparty.h>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/rpc_error.h"
#include "cluster/peer_socket.h"
#include "server/cache/background.h"
#include "server/rpc/bounded_network.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"rpc"};

/// Larger than a message of 8,192 keys; with the kernel's smaller default such a message takes two
/// wake-ups.
constexpr int kSocketBufferBytes = 1 << 20;

/// Words of calls in flight on one connection before the next is read.
constexpr std::size_t kFlowLimitWords = std::size_t{4} << 20;

/// A hello carries one pidfd, a registration one memfd and, with memory of several allocations, one
/// socket.
constexpr unsigned kFdsPerMessage = 2;

/// Limit of connections accepted in one event-loop iteration.
constexpr int kAcceptsPerTurn = 32;

/// The time for the reason to reach a peer whose connection ends.
constexpr kj::Duration kFarewell = 1 * kj::SECONDS;

/// The pause before the next accept() when the system has no descriptor or memory for a connection.
constexpr kj::Duration kAcceptPause = 100 * kj::MILLISECONDS;

/// The interval between two log lines about clients that may connect as often as they like.
constexpr Duration kLineInterval = std::chrono::seconds(10);

/// The IP address of the other end; empty when it has disconnected.
std::string host_of(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return {};
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* host = nullptr;
  if (address.ss_family == AF_INET) {
    host = &reinterpret_cast<const sockaddr_in*>(&address)->sin_addr;
  } else if (address.ss_family == AF_INET6) {
    host = &reinterpret_cast<const sockaddr_in6*>(&address)->sin6_addr;
  } else {
    return {};
  }
  return ::inet_ntop(address.ss_family, host, text.data(), text.size()) == nullptr ? ""
                                                                                   : text.data();
}

void enlarge(int fd, int forced_option, int option) {
  // The forced one ignores the system's limit and needs a privilege.
  if (::setsockopt(fd, SOL_SOCKET, forced_option, &kSocketBufferBytes, sizeof(int)) != 0) {
    ::setsockopt(fd, SOL_SOCKET, option, &kSocketBufferBytes, sizeof(int));
  }
}

kj::Duration to_kj(Duration time) { return time.count() * kj::NANOSECONDS; }

}  // namespace

/// One connection. Members end in reverse: the calls, the queue, the bytes.
class RpcServer::Connection {
 public:
  Connection(RpcServer& server, const Id128& id, const Peer& peer, UniqueFd fd)
      : server_(server),
        id_(id),
        peer_(peer),
        stream_(server.io_.lowLevelProvider->wrapUnixSocketFd(
            fd.release(), kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP |
                              kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC |
                              kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK)),
        messages_(*stream_, server.options_.limits, [this](const Error* why) { unreadable(why); }),
        network_(messages_, kFdsPerMessage, capnp::rpc::twoparty::Side::SERVER, reader_options()),
        answers_(network_, [this]() { check_answers(); }),
        rpc_(capnp::makeRpcServer(answers_, server.service_->bootstrap(id, peer,
                                                                       [this]() {
                                                                         messages_.greeted();
                                                                         server_.greeted(id_);
                                                                       }))),
        ended_(network_.onDisconnect()
                   .then([this]() { server_.end_later(id_); })
                   .eagerlyEvaluate([this](kj::Exception&&) { server_.end_later(id_); })) {
    messages_.watch_queue_of(network_);
    rpc_.setFlowLimit(kFlowLimitWords);
  }

  std::optional<std::list<Silent>::iterator> silent;  ///< Until it sends its hello.

 private:
  static capnp::ReaderOptions reader_options() {
    capnp::ReaderOptions options;
    options.traversalLimitInWords = BoundedStream::Limits().message_words;
    return options;
  }

  /// The peer closed, or violated a limit. RpcSystem sends the reason and closes, but would wait
  /// forever for a peer that does not read.
  void unreadable(const Error* why) {
    if (why != nullptr) server_.report_closed(peer_, *why);
    farewell_ = server_.io_.provider->getTimer()
                    .afterDelay(kFarewell)
                    .then([this]() { server_.end_later(id_); })
                    .eagerlyEvaluate(nullptr);
  }

  /// An answer was queued. A connection with a full queue ends before the next answer is made,
  /// without a reason for the peer, which does not read.
  void check_answers() {
    if (is_overflowing_ || !messages_.queue_is_full()) return;
    is_overflowing_ = true;
    server_.report_closed(peer_, messages_.queue_error());
    server_.end_next(id_);
  }

  RpcServer& server_;
  Id128 id_;
  Peer peer_;
  kj::Own<kj::AsyncCapabilityStream> stream_;
  BoundedStream messages_;
  capnp::TwoPartyVatNetwork network_;
  BoundedNetwork answers_;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc_;
  bool is_overflowing_ = false;
  kj::Promise<void> ended_;
  kj::Maybe<kj::Promise<void>> farewell_;
};

RpcServer::RpcServer(kj::AsyncIoContext& io, Options options, RpcCounters& counters)
    : io_(io),
      options_(std::move(options)),
      counters_(counters),
      spare_(::open("/dev/null", O_RDONLY | O_CLOEXEC)),
      protocol_lines_(kLineInterval),
      refused_lines_(kLineInterval),
      tasks_(*this) {}

RpcServer::~RpcServer() noexcept(false) {
  stop_accepting();
  while (!connections_.empty()) end_connection(Id128(connections_.begin()->first));
}

void RpcServer::serve(Service service, int listening_fd) {
  service_ = kj::mv(service);
  listening_fd_ = listening_fd;
  observer_ = kj::heap<kj::UnixEventPort::FdObserver>(io_.unixEventPort, listening_fd,
                                                      kj::UnixEventPort::FdObserver::OBSERVE_READ);
  accepting_ = accept_loop().eagerlyEvaluate([](kj::Exception&& problem) {
    PEGA_ASSERT(false, "accepting connections failed: {}", error_from(problem).detail);
  });
}

void RpcServer::stop_accepting() {
  accepting_ = nullptr;
  observer_ = nullptr;
}

kj::Promise<void> RpcServer::accept_loop() {
  switch (accept_some()) {
    case Queue::kMore:
      return next_turn(io_.provider->getTimer()).then([this]() { return accept_loop(); });
    case Queue::kUnreached:
      return io_.provider->getTimer().afterDelay(kAcceptPause).then([this]() {
        return accept_loop();
      });
    case Queue::kEmpty:
      break;
  }
  KJ_IF_MAYBE (observer, observer_) {
    return (*observer)->whenBecomesReadable().then([this]() { return accept_loop(); });
  }
  return kj::NEVER_DONE;
}

RpcServer::Queue RpcServer::accept_some() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    UniqueFd fd(::accept4(listening_fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      add_connection(std::move(fd));
      continue;
    }
    switch (errno) {
      case EAGAIN:
        return Queue::kEmpty;
      case EMFILE:
      case ENFILE:
        if (const Queue left = shed_one(); left != Queue::kMore) return left;
        continue;
      case ECONNABORTED:
      case EINTR:
      case EPROTO:
        continue;  // That connection alone.
      default:     // ENOMEM, ENOBUFS.
        return Queue::kUnreached;
    }
  }
  return Queue::kMore;
}

/// Closes a connection for which there is no descriptor. accept4() fails with that error before it
/// checks the queue: only with the spare descriptor it shows whether a connection waits.
RpcServer::Queue RpcServer::shed_one() {
  // Edge-triggered: a connection left in the queue would not wake the loop again.
  spare_.reset();
  UniqueFd refused(::accept4(listening_fd_, nullptr, nullptr, SOCK_CLOEXEC));
  const Queue left = refused ? Queue::kMore : errno == EAGAIN ? Queue::kEmpty : Queue::kUnreached;
  if (refused) ++counters_.refused_limit;
  refused.reset();
  spare_ = UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  return left;
}

void RpcServer::add_connection(UniqueFd fd) {
  Peer user;
  if (service_->has_users) {
    const auto peer = peer_of(fd.get());
    if (!peer || !may_connect(peer->uid, options_.allowed_uids)) {
      ++counters_.refused_peer;
      if (const auto suppressed = refused_lines_.pass(clock_.now())) {
        kLog.warn(
            "connection refused uid={} suppressed={} reason=\"not root, the server's user or in "
            "--allow-uid\"",
            peer ? std::to_string(peer->uid) : "unknown", *suppressed);
      }
      return;
    }
    user = *peer;
  } else {
    user.address = host_of(fd.get());
    cluster::prepare_peer_socket([&fd](int level, int option, int value) {
      ::setsockopt(fd.get(), level, option, &value, sizeof value);
    });
  }
  if (connections_.size() >= options_.max_connections && !make_room()) {
    ++counters_.refused_limit;
    return;
  }
  enlarge(fd.get(), SO_SNDBUFFORCE, SO_SNDBUF);
  enlarge(fd.get(), SO_RCVBUFFORCE, SO_RCVBUF);
  ++counters_.accepted;
  const Id128 id = Id128::random();
  auto connection = kj::heap<Connection>(*this, id, user, std::move(fd));
  const kj::TimePoint now = io_.provider->getTimer().now();
  connection->silent = silent_.insert(silent_.end(), {id, now + to_kj(options_.hello_timeout)});
  connections_.emplace(id, kj::mv(connection));
  counters_.connections = connections_.size();
  arm_hello_timer();
}

bool RpcServer::make_room() {
  if (silent_.empty()) return false;
  ++counters_.closed_no_hello;
  end_connection(Id128(silent_.front().connection));
  return true;
}

void RpcServer::greeted(const Id128& connection) {
  const auto found = connections_.find(connection);
  if (found == connections_.end() || !found->second->silent) return;
  silent_.erase(*found->second->silent);
  found->second->silent.reset();
  arm_hello_timer();
}

void RpcServer::arm_hello_timer() {
  if (silent_.empty()) {
    hello_timer_ = nullptr;
    is_hello_timer_armed_ = false;
    return;
  }
  if (is_hello_timer_armed_) return;
  is_hello_timer_armed_ = true;
  hello_timer_ = io_.provider->getTimer()
                     .atTime(silent_.front().deadline)
                     .then([this]() {
                       // In a task of its own: close_silent() replaces the promise that runs this.
                       tasks_.add(kj::evalLater([this]() { close_silent(); }));
                     })
                     .eagerlyEvaluate(nullptr);
}

void RpcServer::close_silent() {
  is_hello_timer_armed_ = false;
  const kj::TimePoint now = io_.provider->getTimer().now();
  while (!silent_.empty() && silent_.front().deadline <= now) {
    ++counters_.closed_no_hello;
    kLog.debug("connection closed reason=\"no hello in time\"");
    end_connection(Id128(silent_.front().connection));
  }
  arm_hello_timer();
}

void RpcServer::report_closed(const Peer& peer, const Error& why) {
  ++counters_.closed_protocol;
  const auto suppressed = protocol_lines_.pass(clock_.now());
  if (!suppressed) return;
  if (service_->has_users) {
    kLog.warn("connection closed pid={} uid={} suppressed={} reason=\"{}\"", peer.pid, peer.uid,
              *suppressed, why.detail);
  } else {
    kLog.warn("connection closed address={} suppressed={} reason=\"{}\"", peer.address, *suppressed,
              why.detail);
  }
}

void RpcServer::end_later(const Id128& connection) {
  // A connection's own promises are destroyed with it.
  tasks_.add(kj::evalLater([this, connection]() { end_connection(connection); }));
}

void RpcServer::end_next(const Id128& connection) {
  // A fulfilled promise runs before all queued events, unlike what evalLater() adds.
  auto pair = kj::newPromiseAndFulfiller<void>();
  tasks_.add(pair.promise.then([this, connection]() { end_connection(connection); }));
  pair.fulfiller->fulfill();
}

void RpcServer::end_connection(const Id128& connection) {
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return;
  // Removed from the table first: ending it may end other connections.
  kj::Own<Connection> ended = kj::mv(found->second);
  connections_.erase(found);
  counters_.connections = connections_.size();
  if (ended->silent) {
    silent_.erase(*ended->silent);
    ended->silent.reset();
    if (silent_.empty()) arm_hello_timer();
  }
  service_->ended(connection);
}

void RpcServer::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "ending a connection failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
