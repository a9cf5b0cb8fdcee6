#pragma once
/// \file
/// Pools of other nodes that a mover reads.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/page_layout.h"
#include "transport/device.h"
#include "transport/region.h"

namespace pegaflow {

/// The pools that the server has named, at a device with a network. A pool that could not be read
/// is not read again for a while.
///
/// Thread-bound. At its limit it forgets the pool that was not read for the longest time.
class Pools {
 public:
  static constexpr std::size_t kMost = 64;
  /// The time without reads of a pool that could not be read: each attempt would cost its request
  /// a deadline.
  static constexpr std::chrono::seconds kPause{30};

  /// `device` and `clock` outlive it. `layout`: that of the device's blocks.
  Pools(Device& device, const PageLayout& layout, const Clock& clock)
      : device_(device), layout_(layout), clock_(clock) {}
  /// Calls clear().
  ~Pools() { clear(); }
  Pools(const Pools&) = delete;
  Pools& operator=(const Pools&) = delete;

  /// The names of the pools here. Forgets those whose pause is over first: the server describes
  /// them again, and the device connects again.
  [[nodiscard]] std::vector<std::uint64_t> known();

  /// Adds a pool, or does nothing if it is here. Errors: those of pool_as_peer() and
  /// Device::add_peer(); kBusy when kMost pools are being read.
  Result<void> add(std::uint64_t pool, const FabricDescriptor& fabric);

  /// Begins to read these pages, and returns the pool's name at the device. Errors: kGone for an
  /// unknown pool, kRefused for one that is not read at present, kInternal for a page beyond it.
  Result<std::uint64_t> begin(std::uint64_t pool, std::span<const std::uint32_t> pages);
  /// Ends a read after its last copy. `error`: why it was not whole.
  void end(std::uint64_t pool, const std::optional<Error>& error);

  /// Forgets all pools, at the end of a connection: another server has other names for them. No
  /// batch that reads one of them is in flight.
  void clear();

 private:
  struct Pool {
    std::uint64_t name = 0;  ///< The server's.
    std::uint64_t peer = 0;  ///< The device's.
    std::uint64_t pages = 0;
    std::size_t reads = 0;
    std::optional<TimePoint> paused_until{};
  };
  [[nodiscard]] std::vector<Pool>::iterator find(std::uint64_t pool);

  Device& device_;
  const PageLayout layout_;
  const Clock& clock_;
  std::vector<Pool> pools_;  ///< The one that was read last is the last one.
  std::uint64_t last_peer_ = 0;
};

}  // namespace pegaflow
