#pragma once
/// \file
/// The server's pool in our address space.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

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

  PoolMapping() noexcept;
  PoolMapping(PoolMapping&& other) noexcept;
  PoolMapping& operator=(PoolMapping&& other) noexcept;
  ~PoolMapping();

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

  /// Begins to enter the pool's memory into this process's page table, on a thread of its own, and
  /// returns at once: a copy to a page that is not entered yet costs a page fault, and the first
  /// pass over the pool three to six times what memcpy takes. About 0.1 s a GiB of 4 KiB pages, and
  /// 2 MiB of page table. Where it cannot be done (before Linux 5.14, no thread) the faults come
  /// with the copies. Unmapping ends it within a slice of 2 MiB. Once a mapping.
  void populate();

  /// Waits until what populate() began has ended. For benchmarks and tests; copies need not.
  void wait_populated();

 private:
  class Population;

  explicit PoolMapping(std::span<std::byte> bytes) noexcept;
  void unmap() noexcept;

  std::span<std::byte> bytes_;
  std::unique_ptr<Population> population_;  ///< Ends before `bytes_` are unmapped.
};

}  // namespace pegaflow
