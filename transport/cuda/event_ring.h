#pragma once
/// \file
/// Points in the engine's own work, which saves wait for.

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "transport/cuda/driver.h"
#include "transport/device.h"

namespace pegaflow::cuda {

/// A ring of CUDA events. Nobody gives an event back, so a save that never came to the device holds
/// none; instead an event is used again after `capacity` others.
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

  /// With the context current. Errors: kIo, what CUDA answered.
  Result<Device::Event> record(Stream stream);

  /// Whether so few were recorded since that it was not used again; kNow always is.
  [[nodiscard]] bool has(Device::Event event) const;

  /// Makes `stream` wait for it. Errors: kGone when it was used again; kIo.
  Result<void> wait(Stream stream, Device::Event event);

 private:
  struct Slot {
    EventHandle event = nullptr;
    std::uint64_t number = 0;  ///< Of the Event that it stands for; 0: none yet.
  };
  const std::shared_ptr<Driver> driver_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::uint64_t last_ = 0;
};

}  // namespace pegaflow::cuda
