#pragma once
/// \file
/// The completion of a device's batch, for the thread that measures.

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "transport/device.h"

namespace pegaflow::perf {

/// Waits for the one batch in flight. put() runs on the device's thread, take() on another.
class Inbox {
 public:
  void put(Device::Completion&& completion) {
    const std::lock_guard lock(mutex_);
    completion_ = std::move(completion);
    changed_.notify_one();
  }
  Device::Completion take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return completion_.has_value(); });
    return *std::exchange(completion_, std::nullopt);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Device::Completion> completion_;
};

}  // namespace pegaflow::perf
