#include "engine/zero_pages.h"

#include <cerrno>
#include <cstring>

#include <sys/mman.h>

namespace pegaflow {

Result<void*> map_zero_pages(std::size_t bytes) {
  // MAP_NORESERVE: most of a table for 2^31 slots is never touched and must not count as memory.
  void* const pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) {
    return fail(Errc::kOutOfCapacity, "map {} bytes for a table: {}", bytes, std::strerror(errno));
  }
  return pages;
}

void touch_zero_pages(void* pages, std::size_t bytes) noexcept {
  constexpr std::size_t kPageBytes = 4096;  // The smallest there is; larger ones are touched twice.
  auto* const first = static_cast<volatile std::byte*>(pages);
  for (std::size_t at = 0; at < bytes; at += kPageBytes) first[at] = std::byte{0};
}

void unmap_zero_pages(void* pages, std::size_t bytes) noexcept { ::munmap(pages, bytes); }

}  // namespace pegaflow
