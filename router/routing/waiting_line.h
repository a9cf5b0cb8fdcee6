#pragma once
/// \file
/// The queue of requests that wait for a decode engine with room.

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>

#include "router/routing/fleet.h"

namespace pegaflow::router {

/// An engine with new room takes the request that has waited longest among those that may use this
/// engine. Therefore no engine has room for a request in the line, and a request that finds an
/// engine with room overtakes no request that could use it. Thread-bound.
class WaitingLine {
 public:
  /// One request in the line.
  struct Place {
    /// The requirements on the engine. The objects that it refers to outlive the place.
    Fleet::Request request;
    /// Called once, when the place is removed other than by leave(): with an engine that has room,
    /// which the callee occupies before it returns, or with the reason for having none (kNone,
    /// kDown).
    std::function<void(const Fleet::Choice&)> called;
  };

  /// `place` keeps its address until it was called or has left.
  void join(Place& place) { places_.push_back(&place); }
  /// Has no effect on a place that was called.
  void leave(Place& place) { std::erase(places_, &place); }

  /// Serves the line after `engine` may have got room for one more request.
  void serve(const Fleet& fleet, const std::shared_ptr<Engine>& engine);
  /// Serves the line after the engines have changed: their list, models or health.
  void serve_all(Fleet& fleet);

  [[nodiscard]] std::size_t size() const noexcept { return places_.size(); }

 private:
  std::deque<Place*> places_;  // In the order of arrival.
};

}  // namespace pegaflow::router
