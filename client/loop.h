#pragma once
/// \file
/// What the two private KJ threads of this module have in common.

#include <functional>
#include <optional>

#include <kj/async-io.h>
#include <kj/async-unix.h>

#include "base/error.h"

namespace pegaflow {

/// Empties a Mailbox whenever its descriptor says that there is something. Bound to its KJ thread.
class MailboxPump {
 public:
  /// `drain` empties the mailbox that `fd` belongs to; both outlive the pump.
  MailboxPump(kj::UnixEventPort& port, int fd, std::function<void()> drain)
      : observer_(port, fd, kj::UnixEventPort::FdObserver::OBSERVE_READ),
        drain_(std::move(drain)) {}

  /// Never resolves; throws what `drain` throws.
  kj::Promise<void> run() {
    // Edge-triggered: what comes after this drain is seen, because no event is taken from the
    // kernel before the next line has asked for it.
    drain_();
    return observer_.whenBecomesReadable().then([this] { return run(); });
  }

 private:
  kj::UnixEventPort::FdObserver observer_;
  std::function<void()> drain_;
};

/// Steps that nobody waits for. The first that fails is a broken invariant of ours and ends the
/// loop. Bound to its KJ thread.
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

/// Runs `body` with an event loop of its own, on the calling thread, where PEGA_ASSERT throws.
/// Gives the reason when a broken invariant ended it.
std::optional<Error> run_loop(const std::function<void(kj::AsyncIoContext&)>& body);

}  // namespace pegaflow
