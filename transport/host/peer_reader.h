#pragma once
/// \file
/// Reads the blocks of another process into an engine's blocks.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <sys/types.h>

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/device.h"

namespace pegaflow {

/// The memory of one peer, read with process_vm_readv(). Immutable and thread-safe. Borrows the
/// pidfd.
///
/// The kernel's call takes a number, which another process may have once the peer has ended. So the
/// pidfd is looked at after the last read: while it is not readable, the number is the peer's.
class PeerReader {
 public:
  /// Checks the memory against the layout of the reader's blocks, and reads one byte, by which it
  /// finds out whether the kernel permits it. Errors: those of Device::add_peer().
  static Result<PeerReader> open(const PeerMemory& memory, const PageLayout& layout);

  struct Outcome {
    std::size_t copied = 0;      ///< Copies whose bytes count, from the first.
    std::optional<Error> error;  ///< Why not all.
  };
  /// Copies pages in the order given, from block `pool_offset` of the peer to `block` of `layout`.
  /// Error codes: kGone when the process has ended, kRefused when the kernel forbids the read, and
  /// kIo or that of the errno when it fails. Pages that do not count may be overwritten in part.
  [[nodiscard]] Outcome read(const PageLayout& layout, std::span<const Device::Copy> copies) const;

  [[nodiscard]] std::uint64_t block_count() const noexcept { return block_count_; }

 private:
  /// A segment whose base is an address in the peer.
  struct Remote {
    std::uint64_t base = 0;
    std::uint64_t block_stride_bytes = 0;
  };
  PeerReader(const PeerMemory& memory, pid_t pid);

  std::vector<Remote> segments_;
  std::uint64_t block_count_;
  int process_;
  pid_t pid_;
};

}  // namespace pegaflow
