#pragma once
/// \file
/// Options of the sockets between servers, the same at both ends.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

namespace pegaflow::cluster {

/// Sets what a control connection between nodes needs, by `set(level, option, value)`: answers
/// leave at once, and a connection whose other end is gone without a word ends within about 7 s
/// when it is idle (a probe after 5 s, the user timeout 2 s later) and within 2 s when data is
/// unanswered. The kernel's defaults are 2 hours, for which the dead connection would keep its
/// place.
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
