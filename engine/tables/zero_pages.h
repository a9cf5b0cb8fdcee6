#pragma once
/// \file
/// Large arrays that cost only the memory that was touched.

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace pegaflow::engine {

enum class PageUse : bool {
  kSparse,  ///< Rows here and there: memory is allocated in the smallest pages.
  /// All of it will be touched, and then used in random order: in huge pages where the kernel has
  /// them, because most of a cache miss there is the page walk.
  kDense,
};

/// Maps `bytes` of private zeros. Their memory is allocated when it is first written.
/// Errors: kOutOfCapacity.
Result<void*> map_zero_pages(std::size_t bytes, PageUse use);
void unmap_zero_pages(void* pages, std::size_t bytes) noexcept;
/// Allocates the memory of `count` pages of 4 KiB from `first` on now; returns false when the array
/// ends before `first`.
bool touch_zero_pages(void* pages, std::size_t bytes, std::size_t first,
                      std::size_t count) noexcept;
/// Returns the memory between the two addresses, as far as it is whole pages, which read as zero
/// then. `is_shared`: of a shared mapping, whose pages are returned to all that map it.
void forget_zero_pages(void* begin, void* end, bool is_shared = false) noexcept;

/// A fixed array of T, all bytes zero at first. Movable. The address never changes, so growth can
/// never stall an iteration of the event loop that owns it.
template <typename T>
class ZeroPages {
  static_assert(std::is_trivially_copyable_v<T>, "its bytes are zero, no constructor runs");

 public:
  /// Errors: kOutOfCapacity.
  static Result<ZeroPages> create(std::size_t count, PageUse use = PageUse::kSparse) {
    if (count == 0) return ZeroPages(nullptr, 0);
    PEGA_TRY_LET(void* const pages, map_zero_pages(count * sizeof(T), use));
    return ZeroPages(static_cast<T*>(pages), count);
  }

  /// An array in a shared mapping, which outlives it. Its bytes are zero, or what another process
  /// wrote.
  static ZeroPages shared(std::span<T> elements) noexcept {
    ZeroPages pages(elements.data(), elements.size());
    pages.is_shared_ = true;
    return pages;
  }

  ZeroPages(ZeroPages&& other) noexcept { *this = std::move(other); }
  ZeroPages& operator=(ZeroPages&& other) noexcept {
    std::swap(first_, other.first_);
    std::swap(count_, other.count_);
    std::swap(is_shared_, other.is_shared_);
    return *this;
  }
  ~ZeroPages() {
    if (first_ != nullptr && !is_shared_) unmap_zero_pages(first_, size_bytes());
  }

  void touch() noexcept { touch(0, size_bytes() / 4096 + 1); }
  /// Touches pages of 4 KiB from `first` on; returns false when there are none.
  bool touch(std::size_t first, std::size_t pages) noexcept {
    return touch_zero_pages(first_, size_bytes(), first, pages);
  }
  /// Returns the memory of `pages` pages of 4 KiB from `first` on, the reverse of touch(); returns
  /// false when there are none.
  bool forget_pages(std::size_t first, std::size_t pages) noexcept {
    constexpr std::size_t kPageBytes = 4096;
    if (first * kPageBytes >= size_bytes()) return false;
    auto* const bytes = reinterpret_cast<char*>(first_);
    const std::size_t end = std::min(size_bytes(), (first + pages) * kPageBytes);
    forget_zero_pages(bytes + first * kPageBytes, bytes + end, is_shared_);
    return true;
  }
  /// These elements are no longer needed; each becomes zero or stays as it was.
  void forget(std::size_t first, std::size_t count) noexcept {
    forget_zero_pages(first_ + first, first_ + first + count, is_shared_);
  }

  [[nodiscard]] T& operator[](std::size_t index) noexcept { return first_[index]; }
  [[nodiscard]] const T& operator[](std::size_t index) const noexcept { return first_[index]; }
  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return count_ * sizeof(T); }

 private:
  ZeroPages(T* first, std::size_t count) noexcept : first_(first), count_(count) {}

  T* first_ = nullptr;
  std::size_t count_ = 0;
  bool is_shared_ = false;
};

}  // namespace pegaflow::engine
