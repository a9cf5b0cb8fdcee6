#pragma once
/// \file
/// The receiver of a device's completions in tests.

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "transport/device.h"

namespace pegaflow::testing {

/// Collects completions and lets a test wait for them.
class Completions {
 public:
  Device::CompletionSink sink() {
    return [this](Device::Completion&& completion) {
      std::unique_lock lock(mutex_);
      all_.push_back(std::move(completion));
      changed_.notify_all();
      // A sink that does not return keeps a copy thread busy; tests hold a thread this way.
      ++inside_;
      changed_.wait(lock, [this] { return !held_; });
      --inside_;
    };
  }
  void hold() {
    const std::lock_guard lock(mutex_);
    held_ = true;
  }
  void release() {
    const std::lock_guard lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  std::vector<Device::Completion> wait_for(std::size_t count) {
    std::unique_lock lock(mutex_);
    REQUIRE(
        changed_.wait_for(lock, std::chrono::seconds(30), [&] { return all_.size() >= count; }));
    return all_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Device::Completion> all_;
  bool held_ = false;
  int inside_ = 0;
};

}  // namespace pegaflow::testing
