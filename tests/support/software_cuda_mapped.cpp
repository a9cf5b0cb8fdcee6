// CUDA's virtual memory management in software: an allocation is a memfd.
#include <cerrno>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/software_cuda.h"

namespace pegaflow::testing {
namespace {

using cuda::DeviceAddress;
using cuda::Status;

constexpr Status kInvalidValue = 1;

void* pointer(DeviceAddress address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

void SoftwareCuda::use_expandable_segments(std::uint64_t piece_bytes) {
  const std::lock_guard lock(mutex_);
  piece_bytes_ = piece_bytes;
}

Status SoftwareCuda::adopt_expandable(std::byte* memory, std::uint64_t bytes,
                                      std::uint64_t piece_bytes) {
  const std::lock_guard lock(mutex_);
  const auto base = reinterpret_cast<DeviceAddress>(memory);
  reserved_.emplace(base, bytes);
  adopted_.push_back(base);
  for (std::uint64_t at = 0; at < bytes; at += piece_bytes) {
    UniqueFd piece(::memfd_create("allocation", MFD_CLOEXEC));
    if (::ftruncate(piece.get(), static_cast<off_t>(piece_bytes)) != 0) return kInvalidValue;
    if (Status done = map_locked(base + at, piece_bytes, std::move(piece)); done) return done;
  }
  return allow_locked(base, bytes);
}

void SoftwareCuda::return_adopted() {
  for (const DeviceAddress base : adopted_) {
    // Private memory again: a forked process would share it with this one.
    ::mmap(pointer(base), reserved_.at(base), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }
}

Status SoftwareCuda::allocate_expandable(std::uint64_t bytes, DeviceAddress& address) {
  const std::uint64_t pieces = (bytes + piece_bytes_ - 1) / piece_bytes_;
  memory_left_ -= bytes;
  const Status status = reserve_locked(pieces * piece_bytes_, address);
  if (status != cuda::kSuccess) return status;
  for (std::uint64_t i = 0; i < pieces; ++i) {
    UniqueFd piece(::memfd_create("allocation", MFD_CLOEXEC));
    if (::ftruncate(piece.get(), static_cast<off_t>(piece_bytes_)) != 0) return kInvalidValue;
    const Status mapped = map_locked(address + i * piece_bytes_, piece_bytes_, std::move(piece));
    if (mapped != cuda::kSuccess) return mapped;
  }
  return allow_locked(address, pieces * piece_bytes_);
}

Status SoftwareCuda::release_expandable(DeviceAddress address) {
  const std::uint64_t end = address + reserved_.at(address);
  memory_left_ += end - address;
  mapped_.erase(mapped_.lower_bound(address), mapped_.lower_bound(end));
  ::munmap(pointer(address), end - address);
  reserved_.erase(address);
  return cuda::kSuccess;
}

Status SoftwareCuda::export_mapped(DeviceAddress address, UniqueFd& descriptor, DeviceAddress& base,
                                   std::uint64_t& bytes) {
  const std::lock_guard lock(mutex_);
  if (broken_ != cuda::kSuccess) return broken_;
  const auto behind = mapped_.upper_bound(address);
  if (refuses_sharing_ || behind == mapped_.begin()) return kInvalidValue;
  const auto& [first, mapped] = *std::prev(behind);
  if (address - first >= mapped.bytes) return kInvalidValue;
  base = first;
  bytes = mapped.bytes;
  descriptor = UniqueFd(::fcntl(mapped.allocation.get(), F_DUPFD_CLOEXEC, 0));
  return descriptor ? cuda::kSuccess : cuda::kOutOfMemory;
}

Status SoftwareCuda::reserve_addresses(std::uint64_t bytes, DeviceAddress& base) {
  const std::lock_guard lock(mutex_);
  return broken_ != cuda::kSuccess ? broken_ : reserve_locked(bytes, base);
}
Status SoftwareCuda::reserve_locked(std::uint64_t bytes, DeviceAddress& base) {
  void* const memory =
      ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return cuda::kOutOfMemory;
  base = reinterpret_cast<DeviceAddress>(memory);
  reserved_.emplace(base, bytes);
  return cuda::kSuccess;
}

Status SoftwareCuda::free_addresses(DeviceAddress base, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = reserved_.find(base);
  if (found == reserved_.end() || found->second != bytes) return kInvalidValue;
  // As with CUDA, nothing may be mapped there.
  const auto left = mapped_.lower_bound(base);
  if (left != mapped_.end() && left->first < base + bytes) return kInvalidValue;
  ::munmap(pointer(base), bytes);
  reserved_.erase(found);
  return cuda::kSuccess;
}

Status SoftwareCuda::map(DeviceAddress base, std::uint64_t bytes, int descriptor) {
  const std::lock_guard lock(mutex_);
  if (broken_ != cuda::kSuccess) return broken_;
  if (refuses_sharing_) return kInvalidValue;
  return map_locked(base, bytes, UniqueFd(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0)));
}
Status SoftwareCuda::map_locked(DeviceAddress base, std::uint64_t bytes, UniqueFd allocation) {
  const auto behind = reserved_.upper_bound(base);
  if (behind == reserved_.begin()) return kInvalidValue;
  const auto& [first, size] = *std::prev(behind);
  struct stat status {};
  if (base + bytes > first + size || ::fstat(allocation.get(), &status) != 0 ||
      bytes > static_cast<std::uint64_t>(status.st_size)) {
    return kInvalidValue;
  }
  // Without access, until allow_access().
  if (::mmap(pointer(base), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation.get(), 0) ==
      MAP_FAILED) {
    return kInvalidValue;
  }
  mapped_.emplace(base, Mapped{std::move(allocation), bytes});
  return cuda::kSuccess;
}

Status SoftwareCuda::unmap(DeviceAddress base, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = mapped_.find(base);
  if (found == mapped_.end() || found->second.bytes != bytes) return kInvalidValue;
  if (::mmap(pointer(base), bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return kInvalidValue;
  }
  mapped_.erase(found);
  return cuda::kSuccess;
}

Status SoftwareCuda::allow_access(DeviceAddress base, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  return broken_ != cuda::kSuccess ? broken_ : allow_locked(base, bytes);
}
Status SoftwareCuda::allow_locked(DeviceAddress base, std::uint64_t bytes) {
  return ::mprotect(pointer(base), bytes, PROT_READ | PROT_WRITE) == 0 ? cuda::kSuccess
                                                                       : kInvalidValue;
}

}  // namespace pegaflow::testing
