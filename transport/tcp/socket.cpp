#include "transport/tcp/socket.h"

#include <algorithm>
#include <cerrno>

#include <netinet/tcp.h>

namespace pegaflow::tcp {
namespace {

constexpr int kKind = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

Result<void> set(int socket, int level, int name, int value, const char* what) {
  if (::setsockopt(socket, level, name, &value, sizeof value) == 0) return {};
  return fail_errno(errno, what);
}

}  // namespace

Result<UniqueFd> listen_at(const SocketAddress& address) {
  UniqueFd socket(::socket(address.family(), kKind, 0));
  if (!socket) return fail_errno(errno, "create a socket for " + to_string(address));
  PEGA_TRY(set(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1, "reuse the port of an earlier process"));
  if (::bind(socket.get(), address.data(), address.size()) != 0) {
    return fail_errno(errno, "bind " + to_string(address));
  }
  if (::listen(socket.get(), SOMAXCONN) != 0) {
    return fail_errno(errno, "listen at " + to_string(address));
  }
  return socket;
}

Result<UniqueFd> dial(const SocketAddress& address) {
  UniqueFd socket(::socket(address.family(), kKind, 0));
  if (!socket) return fail_errno(errno, "create a socket for " + to_string(address));
  if (::connect(socket.get(), address.data(), address.size()) != 0 && errno != EINPROGRESS) {
    return fail_errno(errno, "connect to " + to_string(address));
  }
  return socket;
}

Result<void> prepare(int socket, Duration user_timeout) {
  const auto milliseconds =
      static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(user_timeout).count());
  PEGA_TRY(set(socket, IPPROTO_TCP, TCP_NODELAY, 1, "switch off Nagle's algorithm"));
  PEGA_TRY(set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, milliseconds, "set the user timeout"));
  // The user timeout counts from unacknowledged bytes. A connection that waits has none, so only
  // probes detect a peer whose machine is gone.
  PEGA_TRY(set(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "switch on keep-alive"));
  PEGA_TRY(set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 1, "set the time before probes"));
  PEGA_TRY(set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1, "set the time between probes"));
  return {};
}

}  // namespace pegaflow::tcp
