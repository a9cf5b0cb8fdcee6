#pragma once
/// \file
/// The GPU memory of another process, mapped into this one.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/cuda/driver.h"
#include "transport/cuda/kernels.h"
#include "transport/device.h"

namespace pegaflow::cuda {

/// The blocks of a peer, for the kernel that copies them into blocks of this process. Immutable.
///
/// While it exists, the driver does not free the peer's memory, even after the end of its process.
class PeerMapping {
 public:
  /// Maps its allocations into `context`, which is current. `own`: the pieces of the blocks that
  /// its pages are copied into, which are those of `layout`.
  /// Errors: those of Device::add_peer().
  static Result<std::unique_ptr<PeerMapping>> open(std::shared_ptr<Driver> driver, Context context,
                                                   const PeerMemory& memory,
                                                   const PageLayout& layout,
                                                   std::span<const Piece> own);
  PeerMapping(const PeerMapping&) = delete;
  PeerMapping& operator=(const PeerMapping&) = delete;
  /// No copy out of it is in flight.
  ~PeerMapping();

  /// Piece[], on the device: those of the peer's blocks, in the order of `own`.
  [[nodiscard]] DeviceAddress pieces() const noexcept { return pieces_; }
  [[nodiscard]] std::uint64_t block_count() const noexcept { return block_count_; }
  /// Its pidfd.
  [[nodiscard]] int process() const noexcept { return process_; }

 private:
  PeerMapping(std::shared_ptr<Driver> driver, Context context, const PeerMemory& memory)
      : driver_(std::move(driver)),
        context_(context),
        block_count_(memory.block_count),
        process_(memory.process) {}
  struct Addresses {
    DeviceAddress base = 0;
    std::uint64_t bytes = 0;
  };
  /// By segment: the allocation, or the range, that contains it, at its addresses here.
  Result<std::vector<Addresses>> open_handles(std::span<const MemoryHandle> handles);
  Result<std::vector<Addresses>> map_ranges(const MappedMemory& memory);
  /// Reserves the addresses of a range of allocations of these sizes.
  Result<Addresses> reserve(std::span<const std::uint64_t> sizes);
  Result<std::vector<Segment>> map(const PeerMemory& memory);
  Result<void> upload(std::span<const Piece> pieces);

  const std::shared_ptr<Driver> driver_;
  const Context context_;
  const std::uint64_t block_count_;
  const int process_;
  std::vector<DeviceAddress> opened_;
  std::vector<Addresses> reserved_;  ///< In which allocations are mapped,
  std::vector<Addresses> mapped_;    ///< which are these.
  DeviceAddress pieces_ = 0;
};

}  // namespace pegaflow::cuda
