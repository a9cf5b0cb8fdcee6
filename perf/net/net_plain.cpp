#include "perf/net/net_plain.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <list>

#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include "base/os/thread.h"
#include "transport/tcp/socket.h"

namespace pegaflow::perf {
namespace {

/// As many bytes as the lane moves for one connection before it serves the others.
constexpr std::size_t kTurnBytes = 1 << 20;

}  // namespace

PlainSender::PlainSender(UniqueFd listener, std::string address, std::span<const std::byte> memory)
    : listener_(std::move(listener)), address_(std::move(address)), memory_(memory) {}

Result<std::unique_ptr<PlainSender>> PlainSender::start(const std::string& address,
                                                        std::span<const std::byte> memory) {
  PEGA_TRY_LET(const tcp::SocketAddress at, tcp::SocketAddress::parse(address));
  PEGA_TRY_LET(UniqueFd listener, tcp::listen_at(at));
  PEGA_TRY_LET(const tcp::SocketAddress bound, tcp::SocketAddress::near_end(listener.get()));
  std::unique_ptr<PlainSender> sender(
      new PlainSender(std::move(listener), to_string(bound), memory));
  PEGA_TRY_LET(sender->thread_, start_thread("plain-sender", [at = sender.get()] { at->run(); }));
  return sender;
}

PlainSender::~PlainSender() {
  stop_.signal();
  if (thread_.joinable()) thread_.join();
}

bool PlainSender::turn(Connection& connection, std::span<const std::byte> memory) {
  if (connection.left == 0) {
    std::array<std::uint64_t, 2> wanted{};
    const ssize_t got =
        ::recv(connection.socket.get(), wanted.data(), sizeof wanted, MSG_DONTWAIT | MSG_WAITALL);
    if (got < 0 && errno == EAGAIN) return true;
    if (got != static_cast<ssize_t>(sizeof wanted)) return false;
    connection.at = wanted[0] % memory.size();
    connection.left = wanted[1];
  }
  const std::uint64_t part =
      std::min<std::uint64_t>({connection.left, memory.size() - connection.at, kTurnBytes});
  const ssize_t sent = ::send(connection.socket.get(), memory.data() + connection.at, part,
                              MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return errno == EAGAIN;
  connection.left -= static_cast<std::uint64_t>(sent);
  connection.at = (connection.at + static_cast<std::uint64_t>(sent)) % memory.size();
  return true;
}

void PlainSender::run() {
  std::list<Connection> connections;
  for (;;) {
    std::vector<pollfd> entries = {{.fd = stop_.fd(), .events = POLLIN, .revents = 0},
                                   {.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const Connection& connection : connections) {
      const auto events = static_cast<short>(connection.left == 0 ? POLLIN : POLLOUT);
      entries.push_back({.fd = connection.socket.get(), .events = events, .revents = 0});
    }
    if (::poll(entries.data(), entries.size(), -1) < 0) continue;
    if (entries[0].revents != 0) return;
    std::size_t i = 2;
    for (auto connection = connections.begin(); connection != connections.end(); ++i) {
      const bool open = entries[i].revents == 0 || turn(*connection, memory_);
      connection = open ? std::next(connection) : connections.erase(connection);
    }
    if (entries[1].revents != 0) {
      UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      const int on = 1;
      if (socket) ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      if (socket) connections.push_back({.socket = std::move(socket)});
    }
  }
}

Result<PlainReceiver> PlainReceiver::connect(const std::string& address, std::size_t connections) {
  PEGA_TRY_LET(const tcp::SocketAddress to, tcp::SocketAddress::parse(address));
  std::vector<UniqueFd> sockets;
  for (std::size_t i = 0; i < connections; ++i) {
    UniqueFd socket(::socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket || ::connect(socket.get(), to.data(), to.size()) != 0) {
      return fail_errno(errno, "connect to " + address);
    }
    const int on = 1;
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    sockets.push_back(std::move(socket));
  }
  return PlainReceiver(std::move(sockets));
}

Result<void> PlainReceiver::receive(std::span<std::byte> memory, std::uint64_t bytes,
                                    std::uint64_t at) {
  struct Part {
    std::span<std::byte> memory;
    std::uint64_t left = 0;
    std::size_t at = 0;
  };
  std::vector<Part> parts;
  std::vector<pollfd> entries;
  const std::size_t count = std::min<std::size_t>(sockets_.size(), bytes);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t share = bytes * (i + 1) / count - bytes * i / count;
    const std::size_t begin = memory.size() * i / count;
    parts.push_back(
        {.memory = memory.subspan(begin, memory.size() * (i + 1) / count - begin), .left = share});
    entries.push_back({.fd = sockets_[i].get(), .events = POLLIN, .revents = 0});
    const std::array<std::uint64_t, 2> wanted = {at + begin, share};
    if (::send(sockets_[i].get(), wanted.data(), sizeof wanted, MSG_NOSIGNAL) !=
        static_cast<ssize_t>(sizeof wanted)) {
      return fail_errno(errno, "request bytes from a plain socket");
    }
  }
  for (std::size_t open = count; open > 0;) {
    if (::poll(entries.data(), entries.size(), -1) < 0) continue;
    for (std::size_t i = 0; i < count; ++i) {
      if (entries[i].revents == 0) continue;
      Part& part = parts[i];
      const std::uint64_t most =
          std::min<std::uint64_t>({part.left, part.memory.size() - part.at, kTurnBytes});
      const ssize_t got = ::recv(entries[i].fd, part.memory.data() + part.at, most, MSG_DONTWAIT);
      if (got == 0) return fail(Errc::kPeerLost, "the other end closed a plain socket");
      if (got < 0) {
        if (errno == EAGAIN || errno == EINTR) continue;
        return fail_errno(errno, "receive from a plain socket");
      }
      part.left -= static_cast<std::uint64_t>(got);
      part.at = (part.at + static_cast<std::size_t>(got)) % part.memory.size();
      if (part.left == 0) {
        entries[i].fd = -1;
        --open;
      }
    }
  }
  return {};
}

}  // namespace pegaflow::perf
