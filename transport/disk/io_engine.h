#pragma once
/// \file
/// The ways to have the kernel execute pieces.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/disk/io_queue.h"

namespace pegaflow::disk {

/// Executes pieces on one file, which outlives it. Created, used and destroyed on the disk's
/// thread. Nothing is in flight when it is destroyed.
class IoEngine {
 public:
  struct Outcome {
    std::uint32_t piece = 0;
    std::int64_t result = 0;  ///< Bytes, or -errno.
  };

  struct Options {
    int fd = -1;
    int wake_fd = -1;          ///< Ends a wait() when it is readable.
    std::size_t pieces = 512;  ///< In flight, at most.
    unsigned threads = 16;     ///< For the backend `threads`.
    /// Registered with the kernel by the backend `uring`.
    std::span<const std::span<std::byte>> huge_memory;
  };

  virtual ~IoEngine() = default;

  /// Takes a piece; submit() or wait() passes it to the kernel.
  virtual void begin(const Piece& piece) = 0;
  /// Passes everything that was begun to the kernel.
  virtual void submit() = 0;
  /// Submits, waits until a piece has ended, `wake_fd` is readable or `timeout` is over
  /// (Duration::max(): never), and appends all pieces that have ended.
  virtual void wait(Duration timeout, std::vector<Outcome>& outcomes) = 0;
  /// Appends the pieces that have ended, without waiting.
  virtual void poll(std::vector<Outcome>& outcomes) = 0;
  [[nodiscard]] virtual std::uint64_t registered_bytes() const { return 0; }
};

/// Errors: kRefused when io_uring is forbidden, missing or too old; kOutOfCapacity without memory.
Result<std::unique_ptr<IoEngine>> make_uring_engine(const IoEngine::Options& options);
/// Errors: kInternal when no thread can be started.
Result<std::unique_ptr<IoEngine>> make_thread_engine(const IoEngine::Options& options);

}  // namespace pegaflow::disk
