#pragma once
/// \file
/// Where threads meet: a bounded queue of plain values with an eventfd that a loop can wait on.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/os/event_fd.h"

namespace pegaflow {

/// A bounded queue from any thread to one owner.
///
/// Only plain values cross (tickets, spans, outcomes); owners of resources stay on their thread.
/// Full means busy: try_send() returns false at once and no thread waits, so overload is visible at
/// the sender. The first value after an empty queue makes fd() readable, later ones cost no system
/// call.
///
/// try_send() is thread-safe; drain() and fd() belong to the owner's thread. Built on atomics only
/// (Vyukov's bounded queue), so that ThreadSanitizer sees every edge.
template <typename T>
class Mailbox {
  static_assert(std::is_nothrow_move_constructible_v<T> && std::is_default_constructible_v<T>);

 public:
  /// `capacity` is rounded up to a power of two.
  explicit Mailbox(std::size_t capacity) {
    std::size_t size = 2;
    while (size < capacity) size *= 2;
    mask_ = size - 1;
    cells_ = std::make_unique<Cell[]>(size);
    for (std::size_t i = 0; i < size; ++i) cells_[i].turn.store(i, std::memory_order_relaxed);
  }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  /// False when the queue is full; `value` is then untouched.
  [[nodiscard]] bool try_send(T&& value) {
    std::uint64_t position = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[position & mask_];
      const std::uint64_t turn = cell.turn.load(std::memory_order_acquire);
      if (turn == position) {
        if (tail_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
          cell.value = std::move(value);
          cell.turn.store(position + 1, std::memory_order_release);
          // Pairs with the exchange in drain(): either that drain sees this value, or this thread
          // sees its false and wakes the owner.
          if (!awake_.exchange(true, std::memory_order_acq_rel)) wake_.signal();
          return true;
        }
      } else if (turn < position) {
        return false;
      } else {
        position = tail_.load(std::memory_order_relaxed);
      }
    }
  }
  [[nodiscard]] bool try_send(const T& value) { return try_send(T(value)); }

  /// Passes every queued value to `use(T&&)`, in the order of sending, and returns their count.
  /// `use` may send to this mailbox; such values may be passed in the same call, at most capacity()
  /// in all, so that a fast sender cannot hold the owner here. After `most` values the call ends,
  /// and fd() stays readable.
  template <typename Use>
  std::size_t drain(Use&& use, std::size_t most = SIZE_MAX) {
    wake_.clear();
    awake_.exchange(false, std::memory_order_acq_rel);
    std::size_t count = 0;
    while (count <= mask_ && count < most) {
      Cell& cell = cells_[head_ & mask_];
      if (cell.turn.load(std::memory_order_acquire) != head_ + 1) return count;
      T value = std::move(cell.value);
      cell.value = T();
      cell.turn.store(head_ + mask_ + 1, std::memory_order_release);
      ++head_;
      ++count;
      use(std::move(value));
    }
    if (!awake_.exchange(true, std::memory_order_acq_rel)) wake_.signal();  // There may be more.
    return count;
  }

  /// Readable while values may wait. For a loop's poll; never read it, drain() does.
  [[nodiscard]] int fd() const noexcept { return wake_.fd(); }
  [[nodiscard]] std::size_t capacity() const noexcept { return mask_ + 1; }

 private:
  struct Cell {
    std::atomic<std::uint64_t> turn{0};
    T value{};
  };

  std::size_t mask_ = 0;
  std::unique_ptr<Cell[]> cells_;
  EventFd wake_;
  std::atomic<bool> awake_{false};
  alignas(64) std::atomic<std::uint64_t> tail_{0};
  alignas(64) std::uint64_t head_ = 0;
};

}  // namespace pegaflow
