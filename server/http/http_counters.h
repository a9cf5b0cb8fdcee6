#pragma once
/// \file
/// The counters of HTTP connections, for metrics.

#include <cstdint>

namespace pegaflow::server {

/// The counters of HTTP connections, of the HTTP thread.
struct HttpCounters {
  std::uint64_t open = 0;
  std::uint64_t unread = 0;           ///< Closed: the client did not take a response in time.
  std::uint64_t displaced = 0;        ///< Closed to make room for a new one.
  std::uint64_t refused_user = 0;     ///< At the Unix socket.
  std::uint64_t refused_routers = 0;  ///< Requests for pages of routers without a valid token.
};

}  // namespace pegaflow::server
