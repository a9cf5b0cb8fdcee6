#pragma once
/// \file
/// The calls of one session that take several event-loop iterations, in the order of their arrival.

#include <cstddef>

#include <kj/async.h>
#include <kj/timer.h>

#include "server/cache/background.h"

namespace pegaflow::server {

/// Runs calls that take several event-loop iterations one after the other, in the order of their
/// arrival: an `abandon` behind a `reserve` must find it done. Thread-bound.
class InOrder {
 public:
  [[nodiscard]] bool is_idle() const { return waiting_ == 0; }

  /// Calls `step` now if no earlier call is unfinished, and once in each later iteration while it
  /// returns true.
  template <typename Step>
  kj::Promise<void> run(kj::Timer& timer, Step step) {
    if (waiting_ == 0 && !step()) return kj::READY_NOW;
    ++waiting_;
    auto done =
        last_.addBranch()
            .then([&timer, step = kj::mv(step)]() mutable { return repeat(timer, kj::mv(step)); })
            .then([this]() { --waiting_; })
            .fork();
    auto answer = done.addBranch();
    last_ = kj::mv(done);
    return answer;
  }

 private:
  template <typename Step>
  static kj::Promise<void> repeat(kj::Timer& timer, Step step) {
    return next_turn(timer).then([&timer, step = kj::mv(step)]() mutable -> kj::Promise<void> {
      if (!step()) return kj::READY_NOW;
      return repeat(timer, kj::mv(step));
    });
  }

  std::size_t waiting_ = 0;
  kj::ForkedPromise<void> last_ = kj::Promise<void>(kj::READY_NOW).fork();
};

}  // namespace pegaflow::server
