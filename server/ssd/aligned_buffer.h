#pragma once
/// \file
/// Memory for I/O that does not go into the pool.

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>

#include "base/assert.h"
#include "transport/disk/disk.h"

namespace pegaflow::server {

/// Zeros, aligned as a disk requires. Shared by a request and its completion.
class AlignedBuffer {
 public:
  /// `size` is a multiple of Disk::kAlignment.
  explicit AlignedBuffer(std::size_t size)
      : bytes_(static_cast<std::byte*>(std::aligned_alloc(Disk::kAlignment, size))), size_(size) {
    PEGA_ASSERT(bytes_ != nullptr, "no memory for {} bytes of I/O", size);
    std::fill_n(bytes_.get(), size, std::byte{0});
  }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {bytes_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* bytes) const noexcept { std::free(bytes); }
  };
  std::unique_ptr<std::byte, Free> bytes_;
  std::size_t size_;
};

}  // namespace pegaflow::server
