#pragma once
/// \file
/// The file of a disk: its creation, its lock and its allocation.

#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/unique_fd.h"
#include "transport/disk/disk.h"

namespace pegaflow::disk {

/// An open, exclusively locked regular file. The lock ends with the last reference to the open
/// file, which I/O in flight holds as well. Thread-bound; the descriptor may be used by any thread.
class DiskFile {
 public:
  /// Errors: those of open_disk() that concern the path, the lock and the allocation.
  static Result<DiskFile> open(const std::string& path, std::uint64_t size_bytes,
                               Duration lock_wait);

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  [[nodiscard]] bool is_new() const noexcept { return is_new_; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return size_bytes_; }

  /// As Disk::resize().
  Result<void> resize(std::uint64_t size_bytes);

  /// Releases the lock at once, when nothing is in flight: a ring gives up its reference to the
  /// file some time after it was closed.
  void unlock() noexcept;

  /// Without O_DIRECT: keeps the pages of this file from displacing others. Called after each piece
  /// that succeeded.
  void drop_cache(Disk::Operation operation, std::uint64_t offset, std::uint64_t bytes) const;

 private:
  DiskFile() = default;
  Result<void> open_path(const std::string& path);
  Result<void> lock(Duration wait);
  Result<void> prove_direct();

  UniqueFd fd_;
  std::string path_;
  bool direct_ = true;
  bool is_new_ = false;
  std::uint64_t size_bytes_ = 0;
};

}  // namespace pegaflow::disk
