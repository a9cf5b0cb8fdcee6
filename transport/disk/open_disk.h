#pragma once
/// \file
/// Opens a disk of this machine: chooses the backend, creates and locks the file.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/disk/disk.h"

namespace pegaflow {

enum class DiskBackend : std::uint8_t {
  kAuto,     ///< io_uring if the kernel and the container allow it, otherwise threads.
  kUring,    ///< io_uring, or an error.
  kThreads,  ///< preadv2() and pwritev2() on a bounded number of threads.
};

/// Parses "auto", "uring" or "threads". Errors: kInvalidArgument that names the text and these.
Result<DiskBackend> parse_disk_backend(std::string_view text);

struct DiskOptions {
  /// A file, or a directory, in which the file `pegaflow.ssd` is used. The folder exists.
  std::string path;
  /// The size of a file that is absent or empty: it is allocated. A file with content keeps its
  /// size, because it may belong to another program: see Disk::resize(). A multiple of
  /// Disk::kAlignment.
  std::uint64_t size_bytes = 0;
  DiskBackend backend = DiskBackend::kAuto;
  /// How long to wait for the file's lock: a process that died may have I/O in flight, which ends
  /// within a second or so on a device that works. 0: not at all.
  Duration lock_wait = std::chrono::seconds(10);
  Disk::Limits limits{};
  unsigned threads = 16;  ///< For the backend `threads`; 1 to 64.
  /// Reads with a hook that end within this time after others were reported are reported together,
  /// so that they wake the owner's thread once: at its end, when they have a quarter of
  /// Limits::read_bytes, or when no other read is in flight. 0: each is reported at once, as are
  /// errors and all other requests.
  Duration report_interval{};
  /// Parts of the pool that lie on huge pages: registered with the kernel, which makes their I/O
  /// cheaper. Mapped until the Disk is gone. Memory that cannot be registered is used without.
  std::vector<std::span<std::byte>> huge_memory{};
};

/// Opens or creates the file (mode 0600, O_CLOEXEC, O_DIRECT where the file system has it) and
/// takes an exclusive flock() on it. The lock is free only after the last byte of a dead process's
/// I/O has landed, in the file and in memory that the process shared; that of a process's own end
/// (its pidfd) is no proof. Therefore no process may inherit the descriptor.
///
/// Blocks for up to `lock_wait`. Warns in the log, once per Disk, when O_DIRECT is refused.
///
/// Errors: kInvalidArgument for an option out of its range, and when the folder does not exist;
/// kRefused when the path is neither a regular file nor a directory, when other users may access an
/// existing file, for missing permissions, and for kUring where io_uring is forbidden; kBusy with
/// the holder's pid, if it is known, when the lock is not free in time; kOutOfCapacity, with the
/// bytes that are free, when the file system has no room; kIo; kInternal when no thread starts.
Result<std::unique_ptr<Disk>> open_disk(const DiskOptions& options, Disk::CompletionSink sink);

/// Whether this process may use io_uring. The text is the reason, for logs and the doctor.
struct UringSupport {
  bool allowed = false;
  std::string reason;
};
[[nodiscard]] UringSupport probe_uring();

}  // namespace pegaflow
