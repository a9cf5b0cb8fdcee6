#pragma once
/// \file
/// Linux's epoll, for a changing set of sockets.

#include <array>
#include <cerrno>
#include <cstdint>
#include <span>

#include <sys/epoll.h>

#include "base/error.h"
#include "base/os/unique_fd.h"

namespace pegaflow::tcp {

/// Waits for many descriptors. Each has a key that is never reused, so that an event already
/// fetched for a closed descriptor matches none. Thread-bound.
class Poller {
 public:
  using Key = std::uint64_t;

  /// Errors: the kernel's.
  static Result<Poller> create() {
    UniqueFd fd(::epoll_create1(EPOLL_CLOEXEC));
    if (!fd) return fail_errno(errno, "create an epoll instance");
    return Poller(std::move(fd));
  }

  [[nodiscard]] Key new_key() noexcept { return ++last_key_; }

  /// `events` are EPOLLIN and EPOLLOUT. Errors: the kernel's.
  Result<void> add(int fd, Key key, std::uint32_t events) {
    return control(EPOLL_CTL_ADD, fd, key, events);
  }
  Result<void> change(int fd, Key key, std::uint32_t events) {
    return control(EPOLL_CTL_MOD, fd, key, events);
  }
  /// Called before the descriptor is closed: a forked child may hold a duplicate, and closing only
  /// ours would leave the events on.
  void remove(int fd) noexcept { (void)::epoll_ctl(fd_.get(), EPOLL_CTL_DEL, fd, nullptr); }

  /// Returns the events that occur within `timeout_ms` (-1: no limit). Valid until the next call.
  std::span<const epoll_event> wait(int timeout_ms) noexcept {
    const int count =
        ::epoll_wait(fd_.get(), events_.data(), static_cast<int>(events_.size()), timeout_ms);
    return std::span(events_).first(count < 0 ? 0 : static_cast<std::size_t>(count));
  }

 private:
  explicit Poller(UniqueFd fd) noexcept : fd_(std::move(fd)) {}

  Result<void> control(int operation, int fd, Key key, std::uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = key;
    if (::epoll_ctl(fd_.get(), operation, fd, &event) == 0) return {};
    return fail_errno(errno, "watch a socket");
  }

  UniqueFd fd_;
  Key last_key_ = 0;
  std::array<epoll_event, 64> events_{};
};

}  // namespace pegaflow::tcp
