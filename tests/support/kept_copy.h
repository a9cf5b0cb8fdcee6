#pragma once
/// \file
/// The memory of a process that dies here.

#include <cstddef>
#include <stdexcept>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/os/unique_fd.h"

namespace pegaflow::testing {

/// A sealed memfd with the bytes that `fd` has now. Throws std::runtime_error.
inline UniqueFd copy_of(int fd) {
  const auto check = [](bool is_good) {
    if (!is_good) throw std::runtime_error("a memfd cannot be copied");
  };
  UniqueFd copy(::memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const off_t size = ::lseek(fd, 0, SEEK_END);
  check(::ftruncate(copy.get(), size) == 0);
  std::vector<std::byte> bytes;
  for (off_t data = 0; (data = ::lseek(fd, data, SEEK_DATA)) >= 0;) {
    const off_t end = ::lseek(fd, data, SEEK_HOLE);
    bytes.resize(static_cast<std::size_t>(end - data));
    check(::pread(fd, bytes.data(), bytes.size(), data) == end - data);
    check(::pwrite(copy.get(), bytes.data(), bytes.size(), data) == end - data);
    data = end;
  }
  check(::fcntl(copy.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  return copy;
}

}  // namespace pegaflow::testing
