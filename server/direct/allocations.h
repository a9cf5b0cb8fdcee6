#pragma once
/// \file
/// Descriptors of the allocations on GPUs that workers have registered.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/os/unique_fd.h"

namespace pegaflow::server {

/// Closes descriptors on a thread of its own, because the last one of an allocation frees memory of
/// a GPU, for which the RPC thread must not wait. Also limits their number. Thread-safe.
class AllocationCloser {
 public:
  /// At most `most` descriptors are to be open.
  explicit AllocationCloser(std::size_t most) : most_(most) {}
  /// Closes the rest first.
  ~AllocationCloser();
  AllocationCloser(const AllocationCloser&) = delete;
  AllocationCloser& operator=(const AllocationCloser&) = delete;

  /// Room for `count` descriptors. Errors: kRefused with the fix; the kernel's without a thread.
  Result<void> reserve(std::size_t count);
  /// Closes them soon, and then the room is free.
  void close(std::vector<UniqueFd> descriptors, std::size_t reserved);
  /// Descriptors for which room is reserved.
  [[nodiscard]] std::size_t reserved() const noexcept { return reserved_; }

 private:
  struct Ended {
    std::vector<UniqueFd> descriptors;
    std::size_t reserved = 0;
  };
  void run();

  const std::size_t most_;
  std::atomic<std::size_t> reserved_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Ended> ended_;
  bool stopping_ = false;
  std::thread thread_;  ///< Starts with the first reserve().
};

/// The allocations of one worker. Immutable.
///
/// The server keeps the descriptors themselves: those in an unread message are charged to their
/// user, whose other programs could send none any longer once they are as many as a process may
/// have.
class Allocations {
 public:
  /// Takes `count` descriptors out of a worker's DescriptorBox.
  /// Errors: those of DescriptorBox::look() and of AllocationCloser::reserve().
  static Result<std::shared_ptr<const Allocations>> take(std::shared_ptr<AllocationCloser> closer,
                                                         int box, std::size_t count);
  Allocations(const Allocations&) = delete;
  Allocations& operator=(const Allocations&) = delete;
  ~Allocations() { closer_->close(std::move(descriptors_), reserved_); }

  /// A box with duplicates for one reader, which exists until the reader has looked into it.
  /// Errors: those of DescriptorBox::pack().
  [[nodiscard]] Result<UniqueFd> pack() const;

 private:
  Allocations(std::shared_ptr<AllocationCloser> closer, std::size_t reserved)
      : closer_(std::move(closer)), reserved_(reserved) {}

  const std::shared_ptr<AllocationCloser> closer_;
  const std::size_t reserved_;
  std::vector<UniqueFd> descriptors_;
};

}  // namespace pegaflow::server
