#pragma once
/// \file
/// The caller's side of a Disk: aligned memory, and the completions of requests.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tests/support/patience.h"
#include "transport/disk/disk.h"

namespace pegaflow::testing {

/// Zeroed memory aligned to Disk::kAlignment; a multiple of it in size.
class AlignedMemory {
 public:
  explicit AlignedMemory(std::size_t bytes)
      : bytes_(bytes), data_(std::aligned_alloc(Disk::kAlignment, bytes), &std::free) {
    if (data_ == nullptr) throw std::bad_alloc();
    std::fill(span().begin(), span().end(), std::byte{0});
  }
  [[nodiscard]] std::span<std::byte> span() const {
    return {static_cast<std::byte*>(data_.get()), bytes_};
  }
  [[nodiscard]] std::span<std::byte> part(std::size_t offset, std::size_t size) const {
    return span().subspan(offset, size);
  }
  void fill(std::mt19937_64& random) const {
    for (std::size_t at = 0; at < bytes_; at += sizeof(std::uint64_t)) {
      const std::uint64_t word = random();
      std::copy_n(reinterpret_cast<const std::byte*>(&word), sizeof word, span().data() + at);
    }
  }

 private:
  std::size_t bytes_;
  std::unique_ptr<void, decltype(&std::free)> data_;
};

/// Collects completions. Thread-safe; outlives the disk that fills it.
class DiskInbox {
 public:
  void put(Disk::Completion&& completion) {
    const std::lock_guard lock(mutex_);
    order_.push_back(completion.ticket);
    const std::uint64_t ticket = completion.ticket;
    if (!completions_.emplace(ticket, std::move(completion)).second) {
      throw std::logic_error("a request completed twice");
    }
    changed_.notify_all();
  }
  /// Waits for the completion of the request and removes it, so that the ticket may be used again.
  Disk::Completion take(std::uint64_t ticket) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kHang, [&] { return completions_.contains(ticket); })) {
      throw std::runtime_error("a request did not complete");
    }
    return std::move(completions_.extract(ticket).mapped());
  }
  [[nodiscard]] bool has(std::uint64_t ticket) const {
    const std::lock_guard lock(mutex_);
    return completions_.contains(ticket);
  }
  /// The tickets of all completions so far, in their order.
  [[nodiscard]] std::vector<std::uint64_t> order() const {
    const std::lock_guard lock(mutex_);
    return order_;
  }
  Disk::CompletionSink sink() {
    return [this](Disk::Completion&& completion) { put(std::move(completion)); };
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, Disk::Completion> completions_;
  std::vector<std::uint64_t> order_;
};

}  // namespace pegaflow::testing
