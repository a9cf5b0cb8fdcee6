#include "index/memory/zero_array.h"

#include <sys/mman.h>

namespace pegaflow::index {

Result<void*> map_zeros(std::size_t bytes, Pages pages) {
  void* const first = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (first == MAP_FAILED) {
    return fail(Errc::kOutOfCapacity,
                "map {} bytes for the index: out of memory; lower its number of blocks", bytes);
  }
  // Advice: where the kernel has no huge pages the array works with small ones.
  static_cast<void>(
      ::madvise(first, bytes, pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE));
  return first;
}

void unmap_zeros(void* first, std::size_t bytes) noexcept { ::munmap(first, bytes); }

}  // namespace pegaflow::index
