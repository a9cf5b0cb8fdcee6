#pragma once
/// \file
/// Large arrays whose memory is allocated as it is first written.

#include <cstddef>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace pegaflow::index {

/// The pages of an array. Of huge ones the kernel clears 2 MiB at the first write to any of it.
enum class Pages : unsigned char {
  kHuge,   ///< Where the kernel has them: most of a cache miss in a large table is the page walk.
  kSmall,  ///< For tables that are written here and there long before they are full.
};

/// Maps `bytes` of private zeros. Errors: kOutOfCapacity.
Result<void*> map_zeros(std::size_t bytes, Pages pages);
void unmap_zeros(void* first, std::size_t bytes) noexcept;

/// A fixed array of T, all bytes zero at first. Movable; its address never changes.
template <typename T>
class ZeroArray {
  static_assert(std::is_trivially_copyable_v<T>, "its bytes are zero, no constructor runs");

 public:
  /// Errors: kOutOfCapacity.
  static Result<ZeroArray> create(std::size_t count, Pages pages = Pages::kHuge) {
    PEGA_TRY_LET(void* const first, map_zeros(count * sizeof(T), pages));
    return ZeroArray(static_cast<T*>(first), count);
  }

  ZeroArray(ZeroArray&& other) noexcept
      : first_(std::exchange(other.first_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  ZeroArray& operator=(ZeroArray&& other) noexcept {
    std::swap(first_, other.first_);
    std::swap(count_, other.count_);
    return *this;
  }
  ZeroArray(const ZeroArray&) = delete;
  ZeroArray& operator=(const ZeroArray&) = delete;
  ~ZeroArray() {
    if (first_ != nullptr) unmap_zeros(first_, bytes());
  }

  T& operator[](std::size_t i) noexcept { return first_[i]; }
  const T& operator[](std::size_t i) const noexcept { return first_[i]; }
  [[nodiscard]] const T* data() const noexcept { return first_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return count_ * sizeof(T); }

 private:
  ZeroArray(T* first, std::size_t count) : first_(first), count_(count) {}
  T* first_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace pegaflow::index
