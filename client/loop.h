#pragma once
/// \file
/// The parts that this module's private KJ threads have in common.

#include <functional>
#include <optional>

#include <kj/async-io.h>
#include <kj/async-unix.h>

#include "base/error.h"

namespace pegaflow {

/// Empties a Mailbox whenever its descriptor becomes readable. Bound to its KJ thread.
class MailboxPump {
 public:
  /// `drain` empties the mailbox that `fd` belongs to; both outlive the pump.
  MailboxPump(kj::UnixEventPort& port, int fd, std::function<void()> drain)
      : observer_(port, fd, kj::UnixEventPort::FdObserver::OBSERVE_READ),
        drain_(std::move(drain)) {}

  /// Never resolves; throws what `drain` throws.
  kj::Promise<void> run() {
    // Edge-triggered: a value sent after this drain is seen, because no event is taken from the
    // kernel before the next line requests it.
    drain_();
    return observer_.whenBecomesReadable().then([this] { return run(); });
  }

 private:
  kj::UnixEventPort::FdObserver observer_;
  std::function<void()> drain_;
};

/// Steps that run in the background. The first that fails is a broken invariant and ends the loop.
/// Bound to its KJ thread.
class LoopTasks final : private kj::TaskSet::ErrorHandler {
 public:
  LoopTasks() : failure_(kj::newPromiseAndFulfiller<void>()), tasks_(*this) {}

  void add(kj::Promise<void>&& task) { tasks_.add(kj::mv(task)); }

  /// Rejected once a step has failed. Call it once.
  kj::Promise<void> failure() { return kj::mv(failure_.promise); }

 private:
  void taskFailed(kj::Exception&& exception) override {
    failure_.fulfiller->reject(kj::mv(exception));
  }

  kj::PromiseFulfillerPair<void> failure_;
  kj::TaskSet tasks_;
};

/// Runs `body` with a new event loop on the calling thread, where PEGA_ASSERT throws. Returns the
/// reason if a broken invariant ended it.
std::optional<Error> run_loop(const std::function<void(kj::AsyncIoContext&)>& body);

}  // namespace pegaflow
