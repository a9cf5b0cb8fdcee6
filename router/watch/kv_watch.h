#pragma once
/// \file
/// Receives the engines' KV events, and asks the engines where they publish them.

#include <memory>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/error.h"
#include "index/events/event_socket.h"
#include "router/kv/kv_routing.h"
#include "router/state/shared.h"

namespace pegaflow::router {

/// The memory and the sockets of the policy kv-aware. Thread-bound.
struct KvParts {
  std::unique_ptr<index::EventSocket> events;
  std::unique_ptr<KvRouting> routing;

  /// Errors: kInvalidArgument and kOutOfCapacity that name the option.
  static Result<KvParts> create(const RouterOptions& options, std::uint64_t seed);
};

/// Passes events to KvRouting in slices, between which requests are served. Thread-bound.
class KvWatch {
 public:
  /// Both outlive the object, and the io_context runs until stop() has taken effect.
  KvWatch(Shared& shared, KvParts& parts);

  /// Begins to wait for events and to keep time; returns at once.
  void start();
  void stop();

 private:
  boost::asio::awaitable<void> receive();
  boost::asio::awaitable<void> keep_time();

  Shared& shared_;
  KvParts& parts_;
  boost::asio::posix::stream_descriptor ready_;
  boost::asio::steady_timer timer_;
  bool stopped_ = false;
};

/// Uses the event streams that --kv-events names for the engine, or else asks it for their
/// addresses, if that is due. The engine is up.
void refresh_event_sources(Shared& shared, const std::shared_ptr<Engine>& engine);

}  // namespace pegaflow::router
