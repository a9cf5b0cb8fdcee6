#pragma once
/// \file
/// A clock that continues while the machine is suspended.

#include <ctime>

#include "base/clock.h"

namespace pegaflow::cluster {

/// CLOCK_BOOTTIME: by it a reader decides whether a lease may have ended, also after its machine
/// was suspended. Its times are comparable with each other only. Immutable.
class BootClock final : public Clock {
 public:
  [[nodiscard]] TimePoint now() const noexcept override {
    timespec now{};
    ::clock_gettime(CLOCK_BOOTTIME, &now);
    return TimePoint(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
  }
};

}  // namespace pegaflow::cluster
