#pragma once
/// \file
/// Connections: accepts them, bounds them, ends them.

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
/// Connections are capped, and a connection that says no hello in time is closed. A peer that
/// misbehaves loses its own connection only. There is a timer only while a connection has not said
/// hello or is about to be closed. Thread-bound: the RPC thread.
class RpcServer final : private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    std::size_t max_connections = 1024;
    Duration hello_timeout = std::chrono::seconds(10);
    std::vector<std::uint32_t> allowed_uids;
    BoundedStream::Limits limits;
  };
  /// What is served.
  struct Service {
    /// The bootstrap of a connection; it calls the function once it was greeted as it should be.
    kj::Function<capnp::Capability::Client(const Id128& connection, const Peer& peer,
                                           kj::Function<void()> greeted)>
        bootstrap;
    /// A connection is over; what was served on it goes next.
    kj::Function<void(const Id128& connection)> ended;
    /// Those of a Unix socket, who have to be of `allowed_uids`. Others are nobody.
    bool has_users = true;
  };

  /// `io` and `counters` outlive it.
  RpcServer(kj::AsyncIoContext& io, Options options, RpcCounters& counters);
  ~RpcServer() noexcept(false);

  /// Accepts on `listening_fd`, which stays the caller's. What `service` refers to outlives the
  /// server.
  void serve(Service service, int listening_fd);
  /// Accepts no more; connections that are there go on.
  void stop_accepting();

  /// Ends a connection at once. Unknown ones are fine. Not from within a call on it.
  void end_connection(const Id128& connection);
  /// Ends a connection in a task of its own, which may be asked for from within a call on it.
  void end_later(const Id128& connection);

 private:
  class Connection;
  /// What accept_some() leaves behind.
  enum class Queue : std::uint8_t {
    kEmpty,      ///< The listener wakes us for the next connection.
    kMore,       ///< There may be more, for the next event-loop iteration.
    kUnreached,  ///< The system refuses to hand one over: no event announces when it will.
  };

  kj::Promise<void> accept_loop();
  Queue accept_some();
  Queue shed_one();
  void add_connection(UniqueFd fd);
  bool make_room();
  void greeted(const Id128& connection);
  void end_next(const Id128& connection);
  void tell_closed(const Peer& peer, const Error& why);
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
  UniqueFd spare_;  ///< Given up to accept and close one more when descriptors have run out.

  struct Silent {
    Id128 connection;
    kj::TimePoint deadline;
  };
  std::list<Silent> silent_;  ///< Said no hello yet, oldest first.
  kj::Maybe<kj::Promise<void>> hello_timer_;
  bool is_hello_timer_armed_ = false;

  SteadyClock clock_;         // Of log lines.
  LineLimit protocol_lines_;  ///< Connections closed for what they sent.
  LineLimit refused_lines_;   ///< Connections of users that are not allowed.

  std::unordered_map<Id128, kj::Own<Connection>> connections_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
