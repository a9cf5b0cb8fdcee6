#pragma once
/// \file
/// The server's pool in our address space.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "base/error.h"

namespace pegaflow {

/// Owns the mapping of a pool's memfd. Movable; unmaps when destroyed. Thread-bound; the bytes are
/// for whoever the server gave slots to.
class PoolMapping {
 public:
  /// Maps `size_bytes` of `fd`, which may be closed afterwards. A child of fork() does not get it:
  /// its writes would look like ours.
  /// Errors: kRefused when the memory could shrink under us or has another size, kIo when the
  /// kernel will not map it.
  static Result<PoolMapping> map(int fd, std::uint64_t size_bytes);

  PoolMapping() noexcept = default;
  PoolMapping(PoolMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  PoolMapping& operator=(PoolMapping&& other) noexcept;
  ~PoolMapping();

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  explicit PoolMapping(std::span<std::byte> bytes) noexcept : bytes_(bytes) {}
  std::span<std::byte> bytes_;
};

}  // namespace pegaflow
