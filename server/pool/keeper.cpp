#include "server/pool/keeper.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

#include <poll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace pegaflow::server {
namespace {

/// Servers, and programs that request the state: few, and each message is answered at once.
constexpr std::size_t kMostConnections = 32;

bool is_readable(int fd) {
  pollfd wanted{fd, POLLIN, 0};
  return ::poll(&wanted, 1, 0) == 1;
}

/// Waits for a server that reads what it requested.
bool send_patiently(int socket, const KeeperMessage& message, int first = -1, int second = -1) {
  constexpr int kPatienceMs = 5000;
  for (;;) {
    const auto sent = send_message(socket, message, first, second);
    if (sent) return true;
    if (sent.error().code != Errc::kBusy) return false;
    pollfd wanted{socket, POLLOUT, 0};
    if (::poll(&wanted, 1, kPatienceMs) != 1) return false;
  }
}

/// Removes the socket's file, while it still listens: so no other keeper can have taken the name.
void remove_name(int listener) {
  sockaddr_un address{};
  socklen_t size = sizeof address;
  if (::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) return;
  if (address.sun_family == AF_UNIX && address.sun_path[0] != 0) ::unlink(address.sun_path);
}

}  // namespace

Result<void> Keeper::run(UniqueFd listener) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  sigset_t both;
  sigemptyset(&both);
  sigaddset(&both, SIGTERM);
  sigaddset(&both, SIGINT);
  ::sigprocmask(SIG_BLOCK, &both, nullptr);
  const UniqueFd signals(::signalfd(-1, &both, SFD_CLOEXEC));
  if (!signals) return fail_errno(errno, "signalfd");
  Keeper keeper(std::move(listener));
  const auto served = keeper.serve(signals.get());
  remove_name(keeper.listener_.get());
  return served;
}

Result<void> Keeper::serve(int signals) {
  while (!is_released_) {
    std::vector<pollfd> wanted = {{signals, POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const Connection& each : connections_) wanted.push_back({each.fd.get(), POLLIN, 0});
    for (const Process& each : processes_) wanted.push_back({each.pidfd.get(), POLLIN, 0});
    if (::poll(wanted.data(), wanted.size(), -1) < 0) {
      if (errno == EINTR) continue;
      return fail_errno(errno, "poll");
    }
    if (wanted[0].revents != 0) return {};
    std::size_t at = 2;
    for (auto each = connections_.begin(); each != connections_.end(); ++at) {
      const bool is_over = wanted[at].revents != 0 && !read_one(*each);
      if (is_over && owner_ && owner_->connection == each->fd.get()) owner_->connection = -1;
      each = is_over ? connections_.erase(each) : std::next(each);
    }
    // A server that has ended leaves its clients to the next one; those that ended are no matter.
    std::erase_if(processes_, [](const Process& each) { return is_readable(each.pidfd.get()); });
    if (wanted[1].revents != 0) accept_one();
  }
  return {};
}

void Keeper::accept_one() {
  UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) return;
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return;
  if (peer.uid != 0 && peer.uid != ::geteuid()) return;
  if (connections_.size() == kMostConnections) return;
  connections_.push_back({.fd = std::move(fd), .pid = peer.pid});
}

bool Keeper::read_one(Connection& connection) {
  auto received = receive_message(connection.fd.get());
  if (!received) return received.error().code == Errc::kBusy;
  if (!*received) return false;
  handle(connection, std::move(**received));
  return true;
}

KeeperMessage Keeper::state(KeeperMessage::Kind kind) const {
  KeeperMessage message;
  message.kind = kind;
  message.pool_bytes = pool_bytes_;
  message.pid = owner_ && !owner_has_ended() ? owner_->pid : 0;
  message.keeper_pid = ::getpid();
  message.processes = static_cast<std::uint32_t>(processes_.size());
  return message;
}

void Keeper::handle(Connection& connection, ReceivedMessage&& received) {
  using Kind = KeeperMessage::Kind;
  const KeeperMessage& message = received.message;
  const int to = connection.fd.get();
  // An answer that cannot be sent is that of a caller that is gone: the next read ends it.
  const auto answer = [&](Kind kind) { (void)send_message(to, state(kind)); };
  if (message.kind == Kind::kStatus) return answer(Kind::kState);
  if (message.kind == Kind::kRelease) return release(connection);
  if (message.kind == Kind::kTake) return take(connection, std::move(received.fds[0]));
  if (!owner_ || owner_->connection != to) return answer(Kind::kInvalid);
  switch (message.kind) {
    case Kind::kPut:
      if (!received.fds[0] || !received.fds[1]) return answer(Kind::kInvalid);
      pool_ = std::move(received.fds[0]);
      tables_ = std::move(received.fds[1]);
      pool_bytes_ = message.pool_bytes;
      return answer(Kind::kDone);
    case Kind::kDrop:
      pool_.reset();
      tables_.reset();
      pool_bytes_ = 0;
      processes_.clear();
      return answer(Kind::kDone);
    case Kind::kProcess:
      if (!received.fds[0]) return;
      std::erase_if(processes_, [&](const Process& each) { return each.id == message.process; });
      processes_.push_back({message.process, std::move(received.fds[0])});
      return;
    case Kind::kForget:
      std::erase_if(processes_, [&](const Process& each) { return each.id == message.process; });
      return;
    default:
      return answer(Kind::kInvalid);
  }
}

bool Keeper::owner_has_ended() const { return owner_ && is_readable(owner_->pidfd.get()); }

void Keeper::drain_owner() {
  const auto its = std::find_if(connections_.begin(), connections_.end(), [&](const auto& each) {
    return owner_ && each.fd.get() == owner_->connection;
  });
  if (its == connections_.end()) return;
  // Its end is closed: all that it sent is in the socket, and then the end.
  while (is_readable(its->fd.get()) && read_one(*its)) {
  }
  owner_->connection = -1;
}

void Keeper::take(Connection& connection, UniqueFd pidfd) {
  using Kind = KeeperMessage::Kind;
  const int to = connection.fd.get();
  if (!pidfd) return (void)send_message(to, state(Kind::kInvalid));
  if (owner_ && owner_->connection != to) {
    // The same process may come again, on another connection.
    const bool is_same = connection.pid != 0 && connection.pid == owner_->pid;
    if (!is_same && !owner_has_ended()) return (void)send_message(to, state(Kind::kBusy));
    drain_owner();
  }
  owner_ = Owner{.connection = to, .pidfd = std::move(pidfd), .pid = connection.pid};
  if (!pool_) return (void)send_message(to, state(Kind::kNothing));
  // Without the end of the list the caller knows that it does not have all of it, and comes again.
  if (!send_patiently(to, state(Kind::kPool), pool_.get(), tables_.get())) return;
  for (const Process& each : processes_) {
    KeeperMessage message;
    message.kind = Kind::kProcess;
    message.process = each.id;
    if (!send_patiently(to, message, each.pidfd.get())) return;
  }
  (void)send_patiently(to, state(Kind::kEnd));
}

void Keeper::release(const Connection& connection) {
  using Kind = KeeperMessage::Kind;
  const bool is_owner = owner_ && owner_->connection == connection.fd.get();
  if (owner_ && !is_owner && !owner_has_ended()) {
    return (void)send_message(connection.fd.get(), state(Kind::kBusy));
  }
  (void)send_message(connection.fd.get(), state(Kind::kDone));
  is_released_ = true;
}

}  // namespace pegaflow::server
