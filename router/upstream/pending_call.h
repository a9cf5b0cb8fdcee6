#pragma once
/// \file
/// A call to an engine, as the pool of connections ends it.

#include "router/routing/fleet.h"

namespace pegaflow::router {

/// A call in flight. Thread-bound.
class PendingCall {
 public:
  [[nodiscard]] virtual const Engine& callee() const noexcept = 0;
  /// Ends the pending operation with kCancelled. May be called at any time.
  virtual void cancel() = 0;
  /// Ends it with kGone: the engine is down.
  virtual void give_up() = 0;

 protected:
  PendingCall() = default;
  PendingCall(const PendingCall&) = default;
  PendingCall& operator=(const PendingCall&) = default;
  ~PendingCall() = default;
};

}  // namespace pegaflow::router
