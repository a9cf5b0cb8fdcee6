#pragma once
/// \file
/// Options of the sockets between nodes, the same at both ends.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

namespace pegaflow::cluster {

/// Sets what a control connection between nodes needs, by `set(level, option, value)`: answers are
/// sent at once, and a connection whose other end disappeared ends within about 7 s when it is idle
/// (a probe after 5 s, the user timeout 2 s later) and within 2 s when data is unacknowledged. With
/// the kernel's defaults the dead connection would keep its place for 2 hours.
template <typename Set>
void prepare_peer_socket(Set&& set) {
  constexpr int kUserTimeoutMs = 2000;
  constexpr int kKeepAliveIdleS = 5;
  constexpr int kKeepAliveIntervalS = 1;
  constexpr int kKeepAliveProbes = 3;
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveIdleS);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveIntervalS);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepAliveProbes);
}

}  // namespace pegaflow::cluster
