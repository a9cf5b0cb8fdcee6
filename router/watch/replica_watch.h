#pragma once
/// \file
/// Keeps the connections to the other routers, and starts from the snapshot of one of them.

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "router/replicas/replica_set.h"
#include "router/replicas/replica_socket.h"
#include "router/state/shared.h"
#include "router/upstream/upstream.h"
#include "router/watch/engine_names.h"

namespace pegaflow::router {

/// The addresses of --replicas, resolved with each heartbeat. No request waits for it.
/// Thread-bound.
class ReplicaWatch {
 public:
  /// Opens --replica-listen. `shared` outlives the object, and the io_context runs until stop() has
  /// taken effect. Sets Shared::replicas; uses Shared::kv and Shared::secrets.
  /// Errors: kInvalidArgument and kOutOfCapacity that name the option.
  static Result<std::unique_ptr<ReplicaWatch>> open(Shared& shared);
  ~ReplicaWatch();
  ReplicaWatch(const ReplicaWatch&) = delete;
  ReplicaWatch& operator=(const ReplicaWatch&) = delete;

  /// Begins to send and receive; returns at once. `http_port` is this router's own port.
  void start(std::uint16_t http_port);
  void stop();
  /// HOST:PORT where this router publishes.
  [[nodiscard]] const std::string& address() const { return socket_->address(); }

 private:
  using Descriptor = boost::asio::posix::stream_descriptor;
  /// The subscription to one router.
  struct Line {
    explicit Line(boost::asio::io_context& io) : ready(io) {}
    Descriptor ready;  // A duplicate: Asio closes its own.
    TimePoint opened{};
  };

  ReplicaWatch(Shared& shared, std::unique_ptr<ReplicaSocket> socket);
  void use_addresses();
  void connect(const std::string& address);
  void close_line(const std::string& address);
  /// Lines that are this router's own end; silent ones are opened anew, because ZeroMQ does not
  /// connect again after some failures.
  void tend_lines();
  boost::asio::awaitable<void> receive(std::string address, std::shared_ptr<Line> line);
  /// Waits for the publisher's descriptor, which may be another one.
  void watch_publisher();
  boost::asio::awaitable<void> serve_subscribers(std::shared_ptr<Descriptor> ready);
  boost::asio::awaitable<void> keep_time();
  boost::asio::awaitable<void> load_snapshot();
  boost::asio::awaitable<Result<void>> read_snapshot(std::shared_ptr<Engine> place, Id128 from);

  Shared& shared_;
  std::unique_ptr<ReplicaSocket> socket_;
  ReplicaSet replicas_;
  EngineNames names_;
  std::map<std::string, std::shared_ptr<Line>> lines_;  // By address.
  std::shared_ptr<Descriptor> subscribers_;             // A duplicate of the publisher's.
  boost::asio::steady_timer timer_;
  bool is_flushing_ = false;  // A flush is posted.
  bool is_loading_ = false;
  int snapshot_attempts_ = 0;
  TimePoint began_{};
  bool stopped_ = false;
};

}  // namespace pegaflow::router
