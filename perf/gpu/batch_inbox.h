#pragma once
/// \file
/// The completions of several batches in flight, for a run that keeps a device busy.

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "transport/device.h"

namespace pegaflow::perf {

/// Counts the batches that have completed. put() runs on the device's thread, wait() on another.
class BatchInbox {
 public:
  void put(Device::Completion&& completion) {
    const std::lock_guard lock(mutex_);
    if (completion.error && !error_) error_ = std::move(completion.error);
    ++ended_;
    changed_.notify_all();
  }
  /// Waits until at most `left` of `sent` are in flight. Errors: the first of a batch.
  Result<void> wait(std::uint64_t sent, std::uint64_t left) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return error_ || sent - ended_ <= left; });
    if (error_) return tl::unexpected<Error>(*error_);
    return {};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t ended_ = 0;
  std::optional<Error> error_;
};

}  // namespace pegaflow::perf
