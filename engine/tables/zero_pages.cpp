#include "engine/tables/zero_pages.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

namespace pegaflow::engine {

Result<void*> map_zero_pages(std::size_t bytes, PageUse use) {
  // MAP_NORESERVE: most of a table for 2^31 frames is never touched and must not count as memory.
  void* const pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) {
    return fail(Errc::kOutOfCapacity, "map {} bytes for a table: {}", bytes, std::strerror(errno));
  }
  // Single rows must not cost 2 MiB each, as they would on a machine with transparent huge pages
  // "always". A kernel without them rejects the call, which has the same effect.
  ::madvise(pages, bytes, use == PageUse::kDense ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return pages;
}

bool touch_zero_pages(void* pages, std::size_t bytes, std::size_t first,
                      std::size_t count) noexcept {
  constexpr std::size_t kPageBytes =
      4096;  // The smallest page size; larger pages are touched twice.
  auto* const at = static_cast<unsigned char*>(pages);
  if (first * kPageBytes >= bytes) return false;
  const std::size_t end = std::min(bytes, (first + count) * kPageBytes);
  for (std::size_t byte = first * kPageBytes; byte < end; byte += kPageBytes) {
    // The page may be in use already. Do not read first: that would map the zero page, and the
    // write after it would split a huge page into small ones on older kernels.
    __atomic_fetch_or(at + byte, 0, __ATOMIC_RELAXED);
  }
  return true;
}

void forget_zero_pages(void* begin, void* end, bool is_shared) noexcept {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t from = (reinterpret_cast<std::uintptr_t>(begin) + page - 1) / page * page;
  const std::uintptr_t to = reinterpret_cast<std::uintptr_t>(end) / page * page;
  // If the kernel refuses, the memory just stays. NOLINTNEXTLINE(performance-no-int-to-ptr)
  void* const pages = reinterpret_cast<void*>(from);
  if (from < to) ::madvise(pages, to - from, is_shared ? MADV_REMOVE : MADV_DONTNEED);
}

void unmap_zero_pages(void* pages, std::size_t bytes) noexcept { ::munmap(pages, bytes); }

}  // namespace pegaflow::engine
