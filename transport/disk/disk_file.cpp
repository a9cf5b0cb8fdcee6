#include "transport/disk/disk_file.h"

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>

#include "base/log.h"
#include "base/units.h"
#include "transport/disk/checks.h"

namespace pegaflow::disk {
namespace {

constexpr Log kLog{"disk"};
constexpr const char* kFileInDirectory = "pegaflow.ssd";
constexpr auto kLockPause = std::chrono::milliseconds(5);

tl::unexpected<Error> fail_open(int error, const std::string& path) {
  if (error == ENOENT || error == ENOTDIR) {
    return fail(Errc::kInvalidArgument, "open {}: its folder does not exist", path);
  }
  return fail_errno(error, "open " + path);
}

/// "1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF" is a line of /proc/locks. Returns 0 if no line
/// has the file, as with a holder in another PID namespace.
long holder_of(const struct stat& info) {
  const std::string file =
      fmt::format("{:02x}:{:02x}:{}", major(info.st_dev), minor(info.st_dev), info.st_ino);
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words(line);
    std::string number;
    std::string kind;
    std::string mode;
    std::string access;
    std::string place;
    long pid = 0;
    if (words >> number >> kind >> mode >> access >> pid >> place && kind == "FLOCK" &&
        place == file) {
      return pid;
    }
  }
  return 0;
}

/// Room for `size_bytes`, all of it now. Errors: kOutOfCapacity, kIo.
Result<void> allocate(int fd, const std::string& path, std::uint64_t from, std::uint64_t to) {
  int status = 0;
  do {
    status = ::fallocate(fd, 0, static_cast<off_t>(from), static_cast<off_t>(to - from));
  } while (status != 0 && errno == EINTR);
  if (status == 0) return {};
  const int error = errno;
  if (error == EOPNOTSUPP) {
    if (::ftruncate(fd, static_cast<off_t>(to)) != 0) return fail_errno(errno, "extend " + path);
    kLog.warn("the file system cannot allocate ahead, so writes may find it full path={}", path);
    return {};
  }
  // Parts may have been allocated, also beyond the end of the file.
  if (::ftruncate(fd, static_cast<off_t>(from)) != 0) {
    kLog.warn("the space that was allocated in vain is not given back path={}", path);
  }
  if (error != ENOSPC && error != EDQUOT && error != EFBIG) {
    return fail_errno(error, "allocate " + path);
  }
  struct statvfs room {};
  const bool known = ::fstatvfs(fd, &room) == 0;
  return fail(Errc::kOutOfCapacity, "allocate {} for {}: {}; {} are free: choose a smaller size",
              format_bytes(to - from), path, error == ENOSPC ? "no space left" : "over the limit",
              known ? format_bytes(room.f_bavail * room.f_frsize) : "an unknown number of bytes");
}

}  // namespace

Result<DiskFile> DiskFile::open(const std::string& path, std::uint64_t size_bytes,
                                Duration lock_wait) {
  PEGA_TRY(check_size(size_bytes));
  DiskFile file;
  PEGA_TRY(file.open_path(path));
  PEGA_TRY(file.lock(lock_wait));
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) return fail_errno(errno, "stat " + file.path_);
  file.is_new_ = info.st_size == 0;
  if (file.is_new_) {
    Result<void> allocated = allocate(file.fd(), file.path_, 0, size_bytes);
    if (!allocated) {
      ::unlink(file.path_.c_str());  // Empty, and locked by us.
      return tl::unexpected<Error>(std::move(allocated.error()));
    }
  }
  file.size_bytes_ =
      file.is_new_ ? size_bytes
                   : static_cast<std::uint64_t>(info.st_size) / Disk::kAlignment * Disk::kAlignment;
  PEGA_TRY(file.prove_direct());
  return file;
}

Result<void> DiskFile::open_path(const std::string& path) {
  path_ = path;
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) path_ = path + (path.ends_with('/') ? "" : "/") + kFileInDirectory;
  } else if (errno != ENOENT) {
    return fail_open(errno, path);
  }
  // Never blocks on a FIFO: the kind of the file is checked on the descriptor.
  constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  fd_ = UniqueFd(::open(path_.c_str(), kFlags | O_DIRECT, 0600));
  if (!fd_ && errno == EINVAL) {
    direct_ = false;
    fd_ = UniqueFd(::open(path_.c_str(), kFlags, 0600));
  }
  if (!fd_) return fail_open(errno, path_);
  if (::fstat(fd(), &info) != 0) return fail_errno(errno, "stat " + path_);
  if (!S_ISREG(info.st_mode)) {
    return fail(Errc::kRefused, "open {}: it is neither a regular file nor a directory", path_);
  }
  if ((info.st_mode & 0077U) != 0) {
    return fail(Errc::kRefused,
                "open {}: other users may access it (mode {:04o}), and it holds users' prompts: "
                "chmod 600 {}",
                path_, info.st_mode & 07777U, path_);
  }
  if (info.st_uid != ::geteuid()) {
    return fail(Errc::kRefused,
                "open {}: it belongs to user {}, who may access it, and it holds users' prompts: "
                "chown {} {}",
                path_, info.st_uid, ::geteuid(), path_);
  }
  return {};
}

Result<void> DiskFile::lock(Duration wait) {
  const auto last = std::chrono::steady_clock::now() + wait;
  while (::flock(fd(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return fail_errno(errno, "lock " + path_);
    if (std::chrono::steady_clock::now() >= last) {
      struct stat info {};
      const long pid = ::fstat(fd(), &info) == 0 ? holder_of(info) : 0;
      return fail(Errc::kBusy, "lock {}: {} uses it, or its I/O has not ended after {}", path_,
                  pid > 0 ? fmt::format("process {}", pid) : std::string("another process"),
                  format_duration(wait));
    }
    std::this_thread::sleep_for(kLockPause);
  }
  struct stat named {};
  struct stat opened {};
  if (::stat(path_.c_str(), &named) != 0 || ::fstat(fd(), &opened) != 0 ||
      named.st_ino != opened.st_ino || named.st_dev != opened.st_dev) {
    return fail(Errc::kBusy, "lock {}: the file was replaced meanwhile; try again", path_);
  }
  return {};
}

/// Some file systems accept the flag and refuse the I/O, or need a larger alignment.
Result<void> DiskFile::prove_direct() {
  if (direct_ && size_bytes_ >= Disk::kAlignment) {
    const std::unique_ptr<void, decltype(&std::free)> page(
        std::aligned_alloc(Disk::kAlignment, Disk::kAlignment), &std::free);
    if (page == nullptr) return fail(Errc::kOutOfCapacity, "read {}: no memory for a page", path_);
    const ssize_t read = ::pread(fd(), page.get(), Disk::kAlignment, 0);
    if (read < 0 && errno == EINVAL) {
      direct_ = false;
      const int flags = ::fcntl(fd(), F_GETFL);
      if (flags < 0 || ::fcntl(fd(), F_SETFL, flags & ~O_DIRECT) != 0) {
        return fail_errno(errno, "turn off O_DIRECT for " + path_);
      }
    }
    // Other errors are those of the first page, which its reader reports.
  }
  if (!direct_) {
    kLog.warn(
        "the file system refuses O_DIRECT, so the page cache is used and costs memory and "
        "speed path={}",
        path_);
  }
  return {};
}

void DiskFile::unlock() noexcept { ::flock(fd(), LOCK_UN); }

Result<void> DiskFile::resize(std::uint64_t size_bytes) {
  PEGA_TRY(check_size(size_bytes));
  if (size_bytes > size_bytes_) {
    PEGA_TRY(allocate(fd(), path_, size_bytes_, size_bytes));
  } else if (::ftruncate(fd(), static_cast<off_t>(size_bytes)) != 0) {
    return fail_errno(errno, "cut " + path_);
  }
  size_bytes_ = size_bytes;
  return {};
}

void DiskFile::drop_cache(Disk::Operation operation, std::uint64_t offset,
                          std::uint64_t bytes) const {
  if (direct_) return;
  const auto begin = static_cast<off_t>(offset);
  const auto length = static_cast<off_t>(bytes);
  // All of these are advice: an error changes nothing.
  if (operation == Disk::Operation::kWrite) {
    // Starts writing back; the pages are dropped by the next flush.
    ::sync_file_range(fd(), begin, length, SYNC_FILE_RANGE_WRITE);
  } else {
    ::posix_fadvise(fd(), begin, length, POSIX_FADV_DONTNEED);  // A flush's range is the file.
  }
}

}  // namespace pegaflow::disk
