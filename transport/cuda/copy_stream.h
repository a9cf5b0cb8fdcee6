#pragma once
/// \file
/// One direction of a GPU: its streams, its staging, and the copies in flight on them.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/cuda/copy_plan.h"
#include "transport/cuda/driver.h"
#include "transport/cuda/kernels.h"
#include "transport/cuda/peer_mapping.h"
#include "transport/cuda/staging_ring.h"
#include "transport/device.h"

namespace pegaflow::cuda {

/// The kernels of kernels.cu; all null in a program built without them.
struct Kernels {
  Function gather = nullptr;
  Function scatter = nullptr;
  Function hash_sums = nullptr;
  Function hash_chain = nullptr;
  Function pull = nullptr;
};

/// All kernels of a module. Errors: CUDA's.
Result<Kernels> find_kernels(Driver& driver, Module module);

/// Everything that a stream needs of a layout and a pool, while a device is attached.
struct Attached {
  CopyPlan plan;
  Path path = Path::kDirect;
  std::span<std::byte> pool;
  DeviceAddress pieces = 0;  ///< plan.pieces(), on the device; 0 without kernels.
};

/// Queues slices of pages and reports their end, in the order in which they were queued.
///
/// A save: the kernel stream gathers pages into staging, the copy stream moves them to the pool. A
/// load goes the other way. A slice waits on the device, by events, also for the staging that an
/// earlier slice still uses. Pages of a peer are copied by a kernel, without staging.
///
/// Bound to the copy thread, with the context current, except create() and the destructor.
class CopyStream {
 public:
  struct Options {
    Device::Direction direction = Device::Direction::kSave;
    int kernel_priority = 0;
    unsigned kernel_blocks = 1;  ///< Thread blocks of a gather, at most.
    unsigned pull_blocks = 1;    ///< Those of a copy out of a peer's blocks.
    std::uint64_t staging_bytes = 0;
    std::uint64_t ahead_bytes =
        0;  ///< The limit of queued bytes; slices without staging wait on the device.
    std::uint64_t slice_bytes = 0;
  };

  /// The initial estimate: a PCIe 5 link with 16 lanes.
  static constexpr double kBytesPerNanosecond = 60;
  /// That of copies out of a peer's blocks. [measured: 330 to 370 between two H200]
  static constexpr double kPulledPerNanosecond = 350;
  /// The most pages of one slice.
  static constexpr std::size_t kMaxPages = kMovePages;
  /// The most slices in flight.
  static constexpr std::size_t kMaxFlights = 64;

  /// Creates streams and events. Errors: CUDA's.
  static Result<std::unique_ptr<CopyStream>> create(std::shared_ptr<Driver> driver,
                                                    const Options& options, const Kernels& kernels);
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;
  /// With the context current, and nothing in flight.
  ~CopyStream();

  /// Allocates the staging memory, or less where the GPU does not have as much. Idempotent. Errors:
  /// kOutOfCapacity when not even a small one is left.
  Result<void> take_staging();

  struct Flight {
    std::uint64_t ticket = 0;
    Slice slice;
    /// The hashes of the slice's pages, if they were computed. Valid until the next call of
    /// queue().
    std::span<const std::uint64_t> hashes;
  };
  using Wait = std::function<Result<void>(Stream)>;

  /// Queues the next part of `copies`, from page `copy`, piece `piece` on. `wait` is called with
  /// each stream on which this slice or a later one may read or write the engine's memory. `peer`:
  /// the pages are in its blocks; null: in the pool. Returns no value when enough is queued, until
  /// a flight has ended.
  Result<std::optional<Slice>> queue(const Attached& attached, std::uint64_t ticket,
                                     std::span<const Device::Copy> copies, std::size_t copy,
                                     std::uint32_t piece, const Wait& wait,
                                     const PeerMapping* peer = nullptr);

  /// Returns the oldest flight, if it has ended. Errors: the device's.
  Result<std::optional<Flight>> take_ended();

  [[nodiscard]] std::size_t flights() const noexcept { return flights_.size(); }
  /// When the oldest flight is expected to end, by its bytes; rather a little too early than too
  /// late.
  [[nodiscard]] TimePoint expected_end() const;

  /// Waits until nothing is in flight, or the device has reported that it no longer runs anything.
  void drain();

  /// When all queued copies are expected to end, by the rate of the last flights.
  [[nodiscard]] TimePoint expected_last_end() const;

  /// The stream on which the newest flight ends. Requires a flight.
  [[nodiscard]] Stream last_stream() const;

  [[nodiscard]] Stream stream() const noexcept { return copy_stream_; }
  [[nodiscard]] DeviceAddress staging() const noexcept { return staging_; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return ring_.size_bytes(); }

 private:
  /// The resources of one flight.
  struct Slot {
    EventHandle middle = nullptr;  ///< Between the two streams.
    EventHandle done = nullptr;
    std::byte* shared = nullptr;  ///< uint64 hashes[kMaxPages].
    DeviceAddress shared_on_device = 0;
  };
  struct InFlight {
    std::uint64_t ticket;
    Slice slice;
    std::size_t slot;
    bool staged;
    bool hashed;
    bool pulled;          ///< Out of a peer's blocks.
    bool on_kernels;      ///< It ends on the kernel stream.
    std::uint64_t range;  ///< The slice's range of staging, if it has one.
  };

  CopyStream(std::shared_ptr<Driver> driver, const Options& options, const Kernels& kernels)
      : driver_(std::move(driver)), options_(options), kernels_(kernels) {}
  Result<void> make();
  Result<void> queue_staged(const Attached& attached, const Slice& slice, const Slot& slot,
                            std::span<const Device::Copy> copies, const StagingRing::Range& range,
                            bool hashed);
  /// Makes `stream` wait until the slice with this range of staging has ended.
  Result<void> wait_behind(std::uint64_t range, Stream stream);
  Result<void> queue_direct(const Attached& attached, const Slice& slice, const Slot& slot,
                            std::span<const Device::Copy> copies);
  Result<void> queue_pull(const Attached& attached, const Slice& slice, const Slot& slot,
                          std::span<const Device::Copy> copies, const PeerMapping& peer);
  Result<void> move_pieces(Function kernel, const Attached& attached, const Slice& slice,
                           std::span<const Device::Copy> copies, DeviceAddress at);
  Result<void> hash(const Attached& attached, const Slice& slice, const Slot& slot,
                    DeviceAddress at);
  Result<void> order(EventHandle event, Stream before, Stream after);

  const std::shared_ptr<Driver> driver_;
  const Options options_;
  const Kernels kernels_;
  SteadyClock clock_;
  Stream kernel_stream_ = nullptr;
  Stream copy_stream_ = nullptr;
  std::vector<Slot> slots_;
  std::byte* shared_ = nullptr;
  DeviceAddress staging_ = 0;
  DeviceAddress sums_ = 0;
  StagingRing ring_{0};
  std::deque<InFlight> flights_;
  TimePoint oldest_since_{};  ///< When the oldest flight became the oldest.
  std::size_t next_slot_ = 0;
  std::uint64_t queued_bytes_ = 0;  ///< Bytes of all flights.
  /// The rate of the last flights, one after another.
  double bytes_per_nanosecond_ = kBytesPerNanosecond;
};

}  // namespace pegaflow::cuda
