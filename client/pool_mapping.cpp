#include "client/pool_mapping.h"

#include <cerrno>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/units.h"

namespace pegaflow {

Result<PoolMapping> PoolMapping::map(int fd, std::uint64_t size_bytes) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return fail_errno(errno, "look at the pool's descriptor");
  if (size_bytes == 0 || static_cast<std::uint64_t>(info.st_size) != size_bytes) {
    return fail(Errc::kRefused, "the pool's descriptor has {} bytes, the server says {}",
                info.st_size, size_bytes);
  }
  // Without these seals somebody could cut the memory short, and a copy of ours would be SIGBUS.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || (seals & F_SEAL_GROW) == 0) {
    return fail(Errc::kRefused, "the pool is not sealed against a change of its size (seals {:#x})",
                seals);
  }
  void* const memory = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    return fail_errno(errno, "map a pool of " + format_bytes(size_bytes));
  }
  PoolMapping mapping(std::span(static_cast<std::byte*>(memory), size_bytes));
  if (::madvise(memory, size_bytes, MADV_DONTFORK) != 0) {
    return fail_errno(errno, "keep the pool from children");
  }
  return mapping;
}

PoolMapping& PoolMapping::operator=(PoolMapping&& other) noexcept {
  if (this != &other) {
    if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

PoolMapping::~PoolMapping() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace pegaflow
