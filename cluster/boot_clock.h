#pragma once
/// \file
/// Time that goes on while the machine sleeps.

#include <ctime>

#include "base/clock.h"

namespace pegaflow::cluster {

/// CLOCK_BOOTTIME: by it a reader knows whether what was lent to it may have been taken back, also
/// after its machine was suspended. Its times are compared with its own only. Immutable.
class BootClock final : public Clock {
 public:
  [[nodiscard]] TimePoint now() const noexcept override {
    timespec now{};
    ::clock_gettime(CLOCK_BOOTTIME, &now);
    return TimePoint(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
  }
};

}  // namespace pegaflow::cluster
