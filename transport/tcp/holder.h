#pragma once
/// \file
/// The serving side of the lane: a listener and its connections.

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/os/unique_fd.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/region_table.h"
#include "transport/tcp/responder.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::tcp {

/// Accepts a bounded number of readers and serves them. Thread-bound: to the fabric's thread.
class Holder {
 public:
  struct Options {
    /// At the limit, the oldest connection that has not sent its greeting is closed; without one,
    /// the newest is closed at once.
    std::size_t connections = 0;
    Duration greeting_timeout{};  ///< A connection without a greeting by then is closed.
    Duration user_timeout{};
  };

  /// All references outlive it. Errors: the kernel's when it cannot listen at `address`.
  static Result<Holder> open(const SocketAddress& address, const Options& options, Poller& poller,
                             const RegionTable& regions, const Id128& self, const Clock& clock);

  /// The address it listens at, with the port that the kernel chose. Errors: the kernel's.
  [[nodiscard]] Result<SocketAddress> address() const {
    return SocketAddress::near_end(listener_.get());
  }

  /// Returns false when the key is not a holder's.
  bool on_event(Poller::Key key, std::uint32_t events);
  /// Closes connections that did not greet in time, and listens again after a pause.
  void on_time(TimePoint now);
  /// When on_time() has work to do; TimePoint::max(): not before the next event.
  [[nodiscard]] TimePoint next_time() const noexcept { return next_check_; }

 private:
  struct Connection {
    Responder responder;
    TimePoint accepted;
    std::uint32_t events = 0;
  };

  Holder(UniqueFd listener, const Options& options, Poller& poller, const RegionTable& regions,
         const Id128& self, const Clock& clock)
      : listener_(std::move(listener)),
        options_(options),
        poller_(&poller),
        regions_(&regions),
        self_(self),
        clock_(&clock) {}

  void accept_some();
  void take(UniqueFd socket);
  bool make_room();
  void reject(const std::string& reason);
  void check_by(TimePoint time) noexcept { next_check_ = std::min(next_check_, time); }

  UniqueFd listener_;
  Poller::Key listener_key_ = 0;
  bool paused_ = false;  // The system had no descriptor left: the listener is not watched.
  Options options_;
  Poller* poller_;
  const RegionTable* regions_;
  Id128 self_;
  const Clock* clock_;
  std::unordered_map<Poller::Key, std::unique_ptr<Connection>> connections_;
  TimePoint next_check_ = TimePoint::max();
  std::uint64_t rejected_ = 0;  // Since the last log line about it.
  TimePoint next_log_ = TimePoint::min();
};

}  // namespace pegaflow::tcp
