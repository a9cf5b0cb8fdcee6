#include "transport/cuda/event_ring.h"

#include "transport/cuda/cuda_error.h"

namespace pegaflow::cuda {

EventRing::~EventRing() {
  for (const Slot& slot : slots_) {
    if (slot.event != nullptr) driver_->destroy_event(slot.event);
  }
}

Result<Device::Event> EventRing::record(Stream stream) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = last_ + 1;
  Slot& slot = slots_[number % slots_.size()];
  if (slot.event == nullptr) {
    PEGA_TRY(check(*driver_, driver_->create_event(false, slot.event), "create an event"));
  }
  slot.number = 0;
  PEGA_TRY(check(*driver_, driver_->record(slot.event, stream), "record an event"));
  slot.number = last_ = number;
  return Device::Event{number};
}

bool EventRing::has(Device::Event event) const {
  const auto number = static_cast<std::uint64_t>(event);
  const std::lock_guard lock(mutex_);
  return event == Device::Event::kNow || slots_[number % slots_.size()].number == number;
}

Result<bool> EventRing::is_over(Device::Event event) {
  if (event == Device::Event::kNow) return true;
  const auto number = static_cast<std::uint64_t>(event);
  const std::lock_guard lock(mutex_);
  const Slot& slot = slots_[number % slots_.size()];
  if (slot.number != number) {
    return fail(Errc::kGone, "event {} was reused, the last one is {}", number, last_);
  }
  const Status status = driver_->query(slot.event);
  if (status == kNotReady) return false;
  PEGA_TRY(check(*driver_, status, "wait for the engine's work"));
  return true;
}

Result<void> EventRing::wait(Stream stream, Device::Event event) {
  if (event == Device::Event::kNow) return {};
  const auto number = static_cast<std::uint64_t>(event);
  const std::lock_guard lock(mutex_);
  const Slot& slot = slots_[number % slots_.size()];
  if (slot.number != number) {
    return fail(Errc::kGone, "event {} was reused, the last one is {}", number, last_);
  }
  return check(*driver_, driver_->wait(stream, slot.event), "wait for an event");
}

}  // namespace pegaflow::cuda
