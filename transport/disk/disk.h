#pragma once
/// \file
/// The interface to a disk: one file that is read and written in large aligned pieces.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"

namespace pegaflow {

/// Reads and writes ranges of one preallocated file, on a thread of its own.
///
/// Every accepted request completes exactly once, in every case. Until its completion the disk may
/// read or write its memory, however long that takes: no deadline ends a request, because the
/// kernel or the device may still use the memory. A request that hangs keeps its memory and its
/// share of the bytes in flight until the kernel reports its end. A caller that no longer waits
/// forgets the result, never the memory.
///
/// Requests are not ordered among each other, also not those for the same bytes: a caller that
/// needs an order submits the second after the completion of the first. A flush covers the writes
/// that completed before it was submitted.
///
/// The limits are on bytes, one for reads and one for writes, because more bytes in flight than the
/// device needs only wait in its queue. Within them, durable writes and flushes go first, then
/// foreground reads, background reads (at most half of the bytes of reads), and writes. Large
/// requests are cut into pieces, so that a read waits for at most a few pieces of a write. While
/// foreground reads wait or are in flight, no new piece of a write starts, but for a tenth of the
/// bytes, so that writes never starve.
///
/// The bytes of a read that failed and the range of a write that failed have unspecified content.
///
/// submit(), cancel(), stats() and size_bytes() are thread-safe; the rest belongs to the owner's
/// thread.
class Disk {
 public:
  /// Offsets, lengths and addresses of memory are multiples of this.
  static constexpr std::uint64_t kAlignment = 4096;
  static constexpr std::size_t kMostPieces = 1024;  ///< Memory spans of one request.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 30;  ///< The longest request.
  static constexpr std::size_t kMostQueued = 65536;  ///< The limit of Limits::requests.

  enum class Operation : std::uint8_t {
    kRead,
    kWrite,         ///< Completed when the device has taken it; a power cut may still lose it.
    kDurableWrite,  ///< Completed when a power cut can no longer lose it (RWF_DSYNC).
    kFlush,         ///< Makes all completed writes durable (fdatasync). Has no bytes.
  };

  enum class Priority : std::uint8_t {
    kForeground,  ///< A request's first token waits for it.
    kBackground,  ///< Reinsertion and scans. Has a meaning for reads only.
  };

  /// The result of a request.
  struct Completion {
    std::uint64_t ticket = 0;
    Operation operation = Operation::kRead;
    /// No value: all bytes were transferred, and the hook returned no error. Otherwise kIo: the
    /// kernel failed or transferred fewer bytes; kOutOfCapacity: ENOSPC; kCancelled; or the hook's
    /// error. The detail names the operation, the path, the range and the kernel's error.
    std::optional<Error> error{};
    /// The kernel's errno (EIO, ENOSPC, ...); 0 without one, and for a short transfer.
    int error_number = 0;
    /// The numbers that the hook computed, usually the PageChecksum of each page.
    std::vector<std::uint64_t> checksums{};
    Duration waited{};   ///< From submit() to the start of the first piece.
    Duration service{};  ///< From there to the end of the last piece, without the hook.
  };

  /// Runs on the disk's thread: behind a read, when all its bytes have arrived, and before a write,
  /// when none has been passed to the kernel. For hashing and comparing, so that the owner's thread
  /// does neither. May fill `checksums`. An error ends the request: a write is then not performed.
  ///
  /// Captures plain values and touches no memory but that of its request. Does not throw, and calls
  /// nothing of the Disk but stats(). Does not run for requests that failed or were cancelled
  /// before.
  using Hook = std::function<Result<void>(Completion&)>;

  struct Request {
    std::uint64_t ticket = 0;  ///< Chosen by the caller; unique among the requests in flight.
    Operation operation = Operation::kRead;
    Priority priority = Priority::kForeground;
    std::uint64_t offset = 0;  ///< The first byte in the file.
    /// The memory, in the order of the file's bytes; the sum of their sizes is the length. Only
    /// read from by writes. Addresses, sizes and offset are multiples of kAlignment.
    std::vector<std::span<std::byte>> memory{};
    Hook hook{};  ///< Optional.
  };

  /// Called on the disk's thread, once per request. May only pass the completion on (a Mailbox),
  /// and may not call the Disk.
  using CompletionSink = std::function<void(Completion&&)>;

  struct Limits {
    std::uint64_t read_bytes = std::uint64_t{16} << 20;  ///< In flight; 1 MiB to 1 GiB.
    std::uint64_t write_bytes = std::uint64_t{8} << 20;  ///< In flight; 1 MiB to 1 GiB.
    std::size_t requests = 4096;  ///< Accepted and not completed; 1 to kMostQueued.
  };

  /// A description of the opened file, for logs and /health. Immutable.
  struct Attributes {
    std::string path;     ///< That of the file itself, also if a directory was named.
    std::string backend;  ///< "io_uring", "threads" or "sim".
    /// Why this backend: "io_uring_setup is allowed", "io_uring_setup: Operation not permitted; a
    /// seccomp profile forbids it".
    std::string reason;
    bool direct = true;   ///< O_DIRECT. False: through the page cache, with one warning in the log.
    bool is_new = false;  ///< The file was absent or empty, and was allocated: it reads as zeros.
    /// Memory that is registered with the kernel (io_uring's fixed buffers).
    std::uint64_t registered_bytes = 0;
  };

  /// Counts since the start, and gauges of now. A snapshot; the fields may be of slightly different
  /// times.
  struct Stats {
    struct Kind {
      std::uint64_t requests = 0;  ///< Completed, also with an error.
      std::uint64_t errors = 0;  ///< Those of them that ended with an error other than kCancelled.
      std::uint64_t bytes = 0;   ///< Transferred by requests without an error.
      std::uint64_t bytes_in_flight = 0;  ///< Now, between the kernel's acceptance and its report.
      std::uint64_t bytes_queued = 0;     ///< Now, accepted and not passed to the kernel.
    };
    Kind reads;
    Kind writes;                ///< Durable ones too.
    std::uint64_t flushes = 0;  ///< Completed, also with an error.
    std::uint64_t flush_errors = 0;
    std::size_t open_requests = 0;  ///< Accepted and not completed, now.
  };

  /// Completes every request that has not started with kCancelled, waits for those in flight,
  /// however long the kernel takes, delivers all completions and releases the lock on the file.
  /// Afterwards nothing touches memory.
  virtual ~Disk() = default;

  [[nodiscard]] virtual const Attributes& attributes() const noexcept = 0;

  /// The size of the file, in whole units of kAlignment. Differs from the size that open_disk() was
  /// given if the file existed before.
  [[nodiscard]] virtual std::uint64_t size_bytes() const noexcept = 0;

  /// Allocates the file up to this size, or cuts it there; a multiple of kAlignment, at least one.
  /// For the owner of a file that existed before, once it knows that the content is its own. Waits
  /// for the file system. Not while requests are in flight (kBusy).
  /// Errors: kInvalidArgument for the size; kOutOfCapacity, with the bytes that are free, when the
  /// file system has no room: the file then keeps its size; kIo.
  virtual Result<void> resize(std::uint64_t size_bytes) = 0;

  /// Accepts all of the requests or none. Errors: kBusy when they exceed Limits::requests;
  /// kInvalidArgument for a request whose range, alignment or memory is invalid. All other errors
  /// are reported in the completions. Requests are begun in the order given, within their priority.
  virtual Result<void> submit(std::vector<Request> requests) = 0;
  Result<void> submit(Request request) {
    std::vector<Request> requests;
    requests.push_back(std::move(request));
    return submit(std::move(requests));
  }

  /// Passes no further piece of the request to the kernel. It completes with kCancelled: at once if
  /// nothing of it is in flight, otherwise when that has ended. A request of which everything is
  /// already in flight completes as if it had not been cancelled. Unknown tickets are fine.
  /// Errors: kBusy when the queue is full: the request then continues.
  virtual Result<void> cancel(std::uint64_t ticket) = 0;

  [[nodiscard]] virtual Stats stats() const = 0;
};

}  // namespace pegaflow
