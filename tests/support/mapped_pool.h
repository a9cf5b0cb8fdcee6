#pragma once
/// \file
/// The pool of a server, mapped like a client maps it, so that a test can look at its bytes.

#include <cstddef>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/os/unique_fd.h"
#include "tests/support/server_process.h"

namespace pegaflow::testing {

/// Throws std::runtime_error when the server has no pool.
class MappedPool {
 public:
  explicit MappedPool(const ServerProcess& server) {
    const std::string fds = "/proc/" + std::to_string(server.pid()) + "/fd";
    for (const auto& entry : std::filesystem::directory_iterator(fds)) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(entry, gone).string();
      if (target.rfind("/memfd:", 0) != 0) continue;
      const UniqueFd fd(::open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
      struct stat about {};
      if (!fd || ::fstat(fd.get(), &about) != 0) continue;
      const auto size = static_cast<std::size_t>(about.st_size);
      void* const at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
      if (at != MAP_FAILED) bytes_ = {static_cast<std::byte*>(at), size};
      break;
    }
    if (bytes_.empty()) throw std::runtime_error("the server has no pool to map");
  }
  ~MappedPool() { ::munmap(bytes_.data(), bytes_.size()); }
  MappedPool(const MappedPool&) = delete;
  MappedPool& operator=(const MappedPool&) = delete;

  /// The first place of these bytes; nullptr if there is none.
  [[nodiscard]] std::byte* find(std::span<const std::byte> page) const {
    return static_cast<std::byte*>(
        ::memmem(bytes_.data(), bytes_.size(), page.data(), page.size()));
  }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace pegaflow::testing
