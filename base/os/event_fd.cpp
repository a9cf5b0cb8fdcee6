#include "base/os/event_fd.h"

#include <cerrno>
#include <cstdint>
#include <cstring>

#include <poll.h>
#include <sys/eventfd.h>

#include "base/assert.h"

namespace pegaflow {

EventFd::EventFd() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  PEGA_ASSERT(static_cast<bool>(fd_), "eventfd: {}", std::strerror(errno));
}

void EventFd::signal() noexcept {
  const std::uint64_t one = 1;
  // Fails only if the counter is full, and then the waiter is already awake.
  [[maybe_unused]] const ssize_t written = ::write(fd_.get(), &one, sizeof one);
}

void EventFd::clear() noexcept {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(fd_.get(), &count, sizeof count);
}

bool EventFd::wait(int timeout_ms) noexcept {
  pollfd wanted{fd_.get(), POLLIN, 0};
  return ::poll(&wanted, 1, timeout_ms) > 0;
}

}  // namespace pegaflow
