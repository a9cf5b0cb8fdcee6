#pragma once
/// \file
/// One direction of a GPU: its streams, its staging, and what is under way on them.

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
#include "transport/cuda/staging_ring.h"
#include "transport/device.h"

namespace pegaflow::cuda {

/// The kernels of kernels.cu; all null where the program was built without them.
struct Kernels {
  Function gather = nullptr;
  Function scatter = nullptr;
  Function hash_sums = nullptr;
  Function hash_chain = nullptr;
};

/// What a layout and a pool are to a lane, while a device is attached.
struct Attached {
  CopyPlan plan;
  Path path = Path::kDirect;
  std::span<std::byte> pool;
  DeviceAddress pieces = 0;  ///< plan.pieces(), on the device; 0 without kernels.
};

/// Queues slices of pages and tells when they have ended, in the order they were queued.
///
/// A save: the kernel stream gathers pages into staging, the copy stream moves them to the pool. A
/// load the other way round. What one slice waits for it waits on the device, by events: also for
/// the staging that an earlier one still uses.
///
/// Bound to the copy thread, with the context current, but for create() and the destructor.
class CopyStream {
 public:
  struct Options {
    Device::Direction direction = Device::Direction::kSave;
    int kernel_priority = 0;
    unsigned kernel_blocks = 1;  ///< Thread blocks of a gather, at most.
    std::uint64_t staging_bytes = 0;
    std::uint64_t ahead_bytes = 0;  ///< Queued at most; what lacks staging waits on the device.
    std::uint64_t slice_bytes = 0;
  };

  /// What to expect before anything was seen: a PCIe 5 link with 16 lanes.
  static constexpr double kBytesPerNanosecond = 60;
  /// Pages that one slice has at most.
  static constexpr std::size_t kMaxPages = kMovePages;
  /// Slices under way at most.
  static constexpr std::size_t kMaxFlights = 64;

  /// Makes streams and events. Errors: what CUDA answered.
  static Result<std::unique_ptr<CopyStream>> create(std::shared_ptr<Driver> driver,
                                                    const Options& options, const Kernels& kernels);
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;
  /// With the context current, and nothing under way.
  ~CopyStream();

  /// Takes the staging memory; less than asked for, where the GPU has not so much. Idempotent.
  /// Errors: kOutOfCapacity when not even a small one is left.
  Result<void> take_staging();

  struct Flight {
    std::uint64_t ticket = 0;
    Slice slice;
    /// Of the slice's pages, if they were taken. Valid until the next call of queue().
    std::span<const std::uint64_t> hashes;
  };
  using Wait = std::function<Result<void>(Stream)>;

  /// Queues the next part of `copies`, from page `copy`, piece `piece` on. `wait` is called with
  /// each stream on which this slice or a later one may read or write the engine's memory. No
  /// value: enough is queued, until a flight has ended.
  Result<std::optional<Slice>> queue(const Attached& attached, std::uint64_t ticket,
                                     std::span<const Device::Copy> copies, std::size_t copy,
                                     std::uint32_t piece, const Wait& wait);

  /// The oldest flight, if it has ended. Errors: what happened on the device.
  Result<std::optional<Flight>> take_ended();

  [[nodiscard]] std::size_t flights() const noexcept { return flights_.size(); }
  /// When the oldest flight will have ended, by its bytes; a little too early rather than too late.
  [[nodiscard]] TimePoint expected_end() const;

  /// Waits until nothing is under way, or the device has said that nothing runs on it any more.
  void drain();

  /// When all that is queued will have ended, by what the last flights took.
  [[nodiscard]] TimePoint expected_last_end() const;

  /// On which the newest flight ends. Not without one.
  [[nodiscard]] Stream last_stream() const;

  [[nodiscard]] Stream stream() const noexcept { return copy_stream_; }
  [[nodiscard]] DeviceAddress staging() const noexcept { return staging_; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return ring_.size_bytes(); }

 private:
  /// What belongs to one flight for as long as it lasts.
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
    std::uint64_t range;  ///< Of the staging, if it has any.
  };

  CopyStream(std::shared_ptr<Driver> driver, const Options& options, const Kernels& kernels)
      : driver_(std::move(driver)), options_(options), kernels_(kernels) {}
  Result<void> make();
  Result<void> queue_staged(const Attached& attached, const Slice& slice, const Slot& slot,
                            std::span<const Device::Copy> copies, const StagingRing::Range& range,
                            bool hashed);
  /// Makes `stream` wait until the slice that has this range of the staging is over.
  Result<void> wait_behind(std::uint64_t range, Stream stream);
  Result<void> queue_direct(const Attached& attached, const Slice& slice, const Slot& slot,
                            std::span<const Device::Copy> copies);
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
  TimePoint oldest_since_{};  ///< When the oldest flight became that.
  std::size_t next_slot_ = 0;
  std::uint64_t queued_bytes_ = 0;                     ///< Of all flights.
  double bytes_per_nanosecond_ = kBytesPerNanosecond;  ///< Of the last flights, one after another.
};

}  // namespace pegaflow::cuda
