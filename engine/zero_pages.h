#pragma once
/// \file
/// Large arrays that cost only the memory that was touched.

#include <cstddef>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace pegaflow {

/// Maps `bytes` of private zeros. The pages of memory behind them come when they are first written.
/// Errors: kOutOfCapacity.
Result<void*> map_zero_pages(std::size_t bytes);
void unmap_zero_pages(void* pages, std::size_t bytes) noexcept;
/// Has the memory behind them come now.
void touch_zero_pages(void* pages, std::size_t bytes) noexcept;

/// A fixed array of T, all bytes zero at first. Movable. The address never changes, so growth can
/// never stall a turn of the loop that owns it.
template <typename T>
class ZeroPages {
  static_assert(std::is_trivially_copyable_v<T>, "its bytes are zero, no constructor runs");

 public:
  /// Errors: kOutOfCapacity.
  static Result<ZeroPages> create(std::size_t count) {
    if (count == 0) return ZeroPages(nullptr, 0);
    PEGA_TRY_LET(void* const pages, map_zero_pages(count * sizeof(T)));
    return ZeroPages(static_cast<T*>(pages), count);
  }

  ZeroPages(ZeroPages&& other) noexcept { *this = std::move(other); }
  ZeroPages& operator=(ZeroPages&& other) noexcept {
    std::swap(first_, other.first_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~ZeroPages() {
    if (first_ != nullptr) unmap_zero_pages(first_, size_bytes());
  }

  void touch() noexcept { touch_zero_pages(first_, size_bytes()); }

  [[nodiscard]] T& operator[](std::size_t index) noexcept { return first_[index]; }
  [[nodiscard]] const T& operator[](std::size_t index) const noexcept { return first_[index]; }
  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return count_ * sizeof(T); }

 private:
  ZeroPages(T* first, std::size_t count) noexcept : first_(first), count_(count) {}

  T* first_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace pegaflow
