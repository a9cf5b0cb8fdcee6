#pragma once
/// \file
/// A wake-up that poll() understands.

#include "base/os/unique_fd.h"

namespace pegaflow {

/// Linux's eventfd, non-blocking and close-on-exec. signal() is thread-safe and may be called from
/// a signal handler; the rest belongs to the waiting thread.
class EventFd {
 public:
  /// Stops the process (PEGA_ASSERT) when no descriptor is left, which shows at start.
  EventFd();

  void signal() noexcept;
  /// Makes fd() unreadable until the next signal().
  void clear() noexcept;
  /// Waits for a signal for at most `timeout_ms` (-1: for ever); false after a timeout.
  bool wait(int timeout_ms) noexcept;
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  UniqueFd fd_;
};

}  // namespace pegaflow
