#pragma once
/// \file
/// A wake-up that poll() understands.

#include "base/os/unique_fd.h"

namespace pegaflow {

/// Linux's eventfd, non-blocking and close-on-exec. signal() is thread-safe and may be called from
/// a signal handler; the rest belongs to the waiting thread.
class EventFd {
 public:
  /// Out of descriptors is a broken set-up, found at start: PEGA_ASSERT.
  EventFd();

  void signal() noexcept;
  /// Makes fd() unreadable until the next signal().
  void clear() noexcept;
  /// Waits until signalled or `timeout_ms` is over (-1: for ever); false when it is over.
  bool wait(int timeout_ms) noexcept;
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  UniqueFd fd_;
};

}  // namespace pegaflow
