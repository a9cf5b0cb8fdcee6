#pragma once
/// \file
/// Accepts connections, limits and ends them.

#include <cstdint>
#include <list>
#include <optional>
#include <unordered_map>
#include <vector>

#include <capnp/capability.h>
#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <kj/function.h>

#include "base/clock.h"
#include "base/id128.h"
#include "base/line_limit.h"
#include "base/os/unique_fd.h"
#include "server/rpc/bounded_stream.h"
#include "server/rpc/listener.h"
#include "server/rpc/rpc_counters.h"

namespace pegaflow::server {

/// Serves a bootstrap interface, which has a hello, on a listening socket.
///
/// The number of connections is limited, and a connection without a hello in time is closed. A
/// misbehaving peer loses only its own connection. There is a timer only while a connection has not
/// sent its hello or is about to be closed. Thread-bound: the RPC thread.
class RpcServer final : private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    std::size_t max_connections = 1024;
    Duration hello_timeout = std::chrono::seconds(10);
    std::vector<std::uint32_t> allowed_uids;
    BoundedStream::Limits limits;
  };
  /// The served interface.
  struct Service {
    /// Returns the bootstrap of a connection, which calls `greeted` after a valid greeting.
    kj::Function<capnp::Capability::Client(const Id128& connection, const Peer& peer,
                                           kj::Function<void()> greeted)>
        bootstrap;
    /// Called when a connection has ended, before its bootstrap is destroyed.
    kj::Function<void(const Id128& connection)> ended;
    /// Whether connections have users, which have to be in `allowed_uids`: those of a Unix socket
    /// do.
    bool has_users = true;
  };

  /// `io` and `counters` outlive it.
  RpcServer(kj::AsyncIoContext& io, Options options, RpcCounters& counters);
  ~RpcServer() noexcept(false);

  /// Accepts connections on `listening_fd`, which stays the caller's. What `service` refers to
  /// outlives the server.
  void serve(Service service, int listening_fd);
  /// Accepts no further connections; open ones continue.
  void stop_accepting();

  /// Ends a connection at once; ignores unknown ones. Not from within a call on it.
  void end_connection(const Id128& connection);
  /// Ends a connection in a task of its own, so it may be called from within a call on it.
  void end_later(const Id128& connection);

 private:
  class Connection;
  /// The state of the accept queue after accept_some().
  enum class Queue : std::uint8_t {
    kEmpty,      ///< The listener wakes the loop for the next connection.
    kMore,       ///< There may be more: the next event-loop iteration continues.
    kUnreached,  ///< accept4() fails for lack of resources: no event announces its recovery.
  };

  kj::Promise<void> accept_loop();
  Queue accept_some();
  Queue shed_one();
  void add_connection(UniqueFd fd);
  bool make_room();
  void greeted(const Id128& connection);
  void end_next(const Id128& connection);
  void report_closed(const Peer& peer, const Error& why);
  void arm_hello_timer();
  void close_silent();
  void taskFailed(kj::Exception&& exception) override;

  kj::AsyncIoContext& io_;
  Options options_;
  RpcCounters& counters_;
  std::optional<Service> service_;

  int listening_fd_ = -1;
  kj::Maybe<kj::Own<kj::UnixEventPort::FdObserver>> observer_;
  kj::Maybe<kj::Promise<void>> accepting_;
  UniqueFd spare_;  ///< Closed to accept and close one connection when descriptors have run out.

  struct Silent {
    Id128 connection;
    kj::TimePoint deadline;
  };
  std::list<Silent> silent_;  ///< Connections without a hello, oldest first.
  kj::Maybe<kj::Promise<void>> hello_timer_;
  bool is_hello_timer_armed_ = false;

  SteadyClock clock_;         // For the limits of log lines.
  LineLimit protocol_lines_;  ///< Connections closed for what they sent.
  LineLimit refused_lines_;   ///< Connections of users that are not allowed.

  std::unordered_map<Id128, kj::Own<Connection>> connections_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
