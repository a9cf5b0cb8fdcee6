#pragma once
/// \file
/// The waits of an exchange, which end when its client leaves.

#include <cstdint>
#include <memory>

#include <boost/asio/awaitable.hpp>

#include "base/clock.h"
#include "router/request/client_request.h"

namespace pegaflow::router {

class UpstreamCall;

/// Owns the timer of an exchange, and knows its call to an engine. Thread-bound; one wait and one
/// call at a time.
class ClientWait {
 public:
  explicit ClientWait(ClientRequest& request);
  ~ClientWait();
  ClientWait(const ClientWait&) = delete;
  ClientWait& operator=(const ClientWait&) = delete;

  /// Ends the wait and the call in flight, because the client left.
  void interrupt();

  /// Ends them for another reason: the caller finds that out.
  void cancel();

  /// Waits for `time`, or until wake(). False when the client left.
  boost::asio::awaitable<bool> wait(Duration time);
  /// Waits until wake(). False when the client left.
  boost::asio::awaitable<bool> wait_for_wake();
  void wake();
  /// Waits for a random delay whose mean doubles with each attempt. False when the client left.
  boost::asio::awaitable<bool> wait_before_retry(std::int64_t attempt);

  /// Registers a call for interrupt(), during the lifetime of the scope.
  class CallScope {
   public:
    CallScope(ClientWait& wait, UpstreamCall& call) : wait_(wait) { wait_.call_ = &call; }
    ~CallScope() { wait_.call_ = nullptr; }
    CallScope(const CallScope&) = delete;
    CallScope& operator=(const CallScope&) = delete;

   private:
    ClientWait& wait_;
  };

 private:
  struct Timer;
  boost::asio::awaitable<bool> wait_until(TimePoint end);

  ClientRequest& request_;
  std::unique_ptr<Timer> timer_;
  UpstreamCall* call_ = nullptr;
};

}  // namespace pegaflow::router
