#pragma once
/// \file
/// Huge pages for memory of tmpfs, without a reservation.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/clock.h"
#include "base/error.h"

namespace pegaflow::engine {

/// The size of the huge pages that tmpfs can use; 0 where the kernel has none.
std::uint64_t transparent_huge_page_bytes();

/// Maps all of `fd` for reading and writing, at an address that is a multiple of `alignment`, which
/// is 0 or a power of 2. To be unmapped by the caller.
/// Errors: kOutOfCapacity without address space or memory for page tables; those of
/// the kernel.
Result<std::span<std::byte>> map_aligned(int fd, std::uint64_t size_bytes, std::uint64_t alignment);

/// Allocates huge pages for a mapping of a memfd on tmpfs, as far as the kernel finds any: with
/// MADV_COLLAPSE, which works with the stock setting `never` of shmem_enabled too (Linux 6.1).
///
/// Pages of 4 KiB are scattered over the machine's memory once it is fragmented. Each then costs a
/// disk, a network card and a GPU's driver a descriptor of its own.
///
/// Where no huge page is free, the kernel moves other memory to make one, which is several times
/// slower than taking small pages. No more are tried after a bounded time of it, and after a
/// failure that would repeat itself. Thread-safe.
class Collapse {
 public:
  /// The processor time of each thread in calls that make room, at most.
  static constexpr Duration kPatience = std::chrono::seconds(3);
  /// The same for all threads and a memfd of `size_bytes`: a sixth of the time that its small pages
  /// take, so that a start is hardly longer where memory is fragmented.
  [[nodiscard]] static Duration patience_for(std::uint64_t size_bytes, unsigned threads);

  /// `fd` outlives it. `page_bytes`: 0 to allocate none. `patience`: for all threads together.
  Collapse(int fd, std::uint64_t page_bytes, Duration patience);

  /// Puts the whole huge pages in `chunk`, of which none is present and which begins at `offset` of
  /// the memfd, on huge pages. After a failure some are, and the first small page of each other.
  void add(std::span<std::byte> chunk, std::uint64_t offset);

  /// The bytes that were put on huge pages.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_.load(); }

 private:
  [[nodiscard]] int make(std::span<std::byte> pages, std::uint64_t offset) const;

  const int fd_;
  const std::uint64_t page_bytes_;
  std::atomic<std::int64_t> patience_ns_;  ///< The rest for all threads together.
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint32_t> passing_failures_{0};
};

}  // namespace pegaflow::engine
