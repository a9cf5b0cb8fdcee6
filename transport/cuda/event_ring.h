#pragma once
/// \file
/// Points in the engine's own work that saves wait for.

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "transport/cuda/driver.h"
#include "transport/device.h"

namespace pegaflow::cuda {

/// A ring of CUDA events. Events are not returned, so a save that never reached the device holds
/// none; instead an event is reused after `capacity` others.
///
/// Thread-safe: the engine records, the copy thread waits.
class EventRing {
 public:
  EventRing(std::shared_ptr<Driver> driver, std::size_t capacity)
      : driver_(std::move(driver)), slots_(capacity) {}
  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;
  /// With the context current.
  ~EventRing();

  /// With the context current. Errors: kIo with CUDA's text.
  Result<Device::Event> record(Stream stream);

  /// Whether the event has not been reused yet; always true for kNow.
  [[nodiscard]] bool has(Device::Event event) const;

  /// Whether the engine's work has reached the event. Errors: kGone when it was reused; kIo.
  Result<bool> is_over(Device::Event event);

  /// Makes `stream` wait for the event. Errors: kGone when it was reused; kIo.
  Result<void> wait(Stream stream, Device::Event event);

 private:
  struct Slot {
    EventHandle event = nullptr;
    std::uint64_t number = 0;  ///< The Event that it stands for; 0: none yet.
  };
  const std::shared_ptr<Driver> driver_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::uint64_t last_ = 0;
};

}  // namespace pegaflow::cuda
