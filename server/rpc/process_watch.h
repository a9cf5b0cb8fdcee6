#pragma once
/// \file
/// Knows when a client's process ends, whatever PID namespace it lives in.

#include <memory>

#include <kj/async-unix.h>
#include <kj/function.h>

#include "base/error.h"
#include "base/os/unique_fd.h"
#include "server/rpc/listener.h"

namespace pegaflow::server {

/// Watches one pidfd. A lost connection says nothing about copies under way; a pidfd that became
/// readable does: the process is gone, and its memory with it. Thread-bound: the RPC thread.
class ProcessWatch {
 public:
  /// Takes over `pidfd`, which a client sent of itself. `on_gone` is called once, in a turn of the
  /// loop; it may destroy the watch only in a later one.
  /// Errors: kRefused when it is no pidfd, is that of another process than `peer`, or the process
  /// has ended already.
  static Result<std::shared_ptr<ProcessWatch>> start(kj::UnixEventPort& port, UniqueFd pidfd,
                                                     const Peer& peer,
                                                     kj::Function<void()> on_gone);
  ~ProcessWatch() = default;
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
