#pragma once
/// \file
/// The server's pool in this process's address space.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/error.h"

namespace pegaflow {

/// Owns the mapping of a pool's memfd. Movable; unmaps when destroyed. Thread-bound; the bytes are
/// accessed by the jobs to which the server granted slots.
class PoolMapping {
 public:
  /// Maps `size_bytes` of `fd`, which may be closed afterwards. A child of fork() does not inherit
  /// the mapping: the server could not tell its writes from this process's.
  /// Errors: kRefused when the memory could shrink or has another size, kIo when the kernel does
  /// not map it.
  static Result<PoolMapping> map(int fd, std::uint64_t size_bytes);

  PoolMapping() noexcept;
  PoolMapping(PoolMapping&& other) noexcept;
  PoolMapping& operator=(PoolMapping&& other) noexcept;
  ~PoolMapping();

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

  /// Begins to enter the pool's memory into this process's page table, on a thread of its own, and
  /// returns at once. Without it each first copy to a page causes a page fault, and the first pass
  /// over the pool takes three to six times as long as memcpy. Takes about 0.1 s and 2 MiB of page
  /// table per GiB of 4 KiB pages. Where it is not possible (before Linux 5.14, no thread) the
  /// copies cause the faults. Unmapping ends it within a slice of 2 MiB. Call it once per mapping.
  void populate();

  /// Waits for the end of populate(). For benchmarks and tests; copies do not need it.
  void wait_populated();

 private:
  class Population;

  explicit PoolMapping(std::span<std::byte> bytes) noexcept;
  void unmap() noexcept;

  std::span<std::byte> bytes_;
  std::unique_ptr<Population> population_;  ///< Ends before `bytes_` are unmapped.
};

}  // namespace pegaflow
