#pragma once
/// \file
/// Requests that wait until a decode engine has room.

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>

#include "router/routing/fleet.h"

namespace pegaflow::router {

/// Room that an engine gets goes at once to the request that has waited longest among those that
/// may have this engine. So no engine has room for a request in the line, and a request that finds
/// an engine with room overtakes nobody who could use it. Thread-bound.
class WaitingLine {
 public:
  /// One request in the line.
  struct Place {
    /// What it needs of its engine. What it refers to stays until it has left the line.
    Fleet::Request request;
    /// Called once, when the line is left but for leave(): with an engine that has room, which the
    /// request takes before it returns, or with why there will be none (kNone, kDown).
    std::function<void(const Fleet::Choice&)> called;
  };

  /// `place` stays where it is until it was called or has left.
  void join(Place& place) { places_.push_back(&place); }
  /// Does nothing to one that was called.
  void leave(Place& place) { std::erase(places_, &place); }

  /// `engine` may have room for one more.
  void serve(const Fleet& fleet, const std::shared_ptr<Engine>& engine);
  /// The engines have changed: which there are, what they serve, or whether they are up.
  void serve_all(Fleet& fleet);

  [[nodiscard]] std::size_t size() const noexcept { return places_.size(); }

 private:
  std::deque<Place*> places_;  // In the order in which they came.
};

}  // namespace pegaflow::router
