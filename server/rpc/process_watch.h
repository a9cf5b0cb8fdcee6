#pragma once
/// \file
/// Detects the end of a client's process, in any PID namespace.

#include <memory>

#include <kj/async-unix.h>
#include <kj/function.h>

#include "base/error.h"
#include "base/os/unique_fd.h"
#include "server/rpc/listener.h"

namespace pegaflow::server {

/// Watches one pidfd. A lost connection proves nothing about copies in flight; a readable pidfd
/// does: the process has ended, and its mappings with it. Thread-bound: the RPC thread.
class ProcessWatch {
 public:
  /// Takes over `pidfd`, which a client sent for its own process. `on_gone` is called once, in an
  /// event-loop iteration; it may destroy the watch only in a later one.
  /// Errors: kRefused when it is not a pidfd, is that of another process than `peer`, or the
  /// process has ended already.
  static Result<std::shared_ptr<ProcessWatch>> start(kj::UnixEventPort& port, UniqueFd pidfd,
                                                     const Peer& peer,
                                                     kj::Function<void()> on_gone);
  ~ProcessWatch() = default;
  /// The descriptor of the process.
  [[nodiscard]] int pidfd() const noexcept { return pidfd_.get(); }
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

 private:
  ProcessWatch(kj::UnixEventPort& port, UniqueFd pidfd, kj::Function<void()> on_gone);

  UniqueFd pidfd_;  // Outlives its observer.
  kj::UnixEventPort::FdObserver observer_;
  kj::Function<void()> on_gone_;
  kj::Promise<void> gone_;
};

}  // namespace pegaflow::server
