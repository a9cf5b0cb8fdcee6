#pragma once
/// \file
/// Copies between the pool and the memory of an NVIDIA GPU.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "transport/cuda/copy_plan.h"
#include "transport/cuda/driver.h"
#include "transport/device.h"

namespace pegaflow {
namespace cuda {
class Gpu;
}

/// The Device of engines that keep their KV cache on a GPU. It copies inside the engine's process
/// and in its context: a second process would share the GPU by time slices and take 12 to 50 % of
/// the engine's speed.
///
/// One thread drives both directions, which run side by side; loads are queued first. The copy
/// engine moves segments of some MiB directly. Smaller ones go through staging: a kernel gathers
/// pages in device memory, and the copy engine moves them as a whole. Each layout decides between
/// the two, and for segments between 256 KiB and 2 MiB a measurement of the copy engine when the
/// pool is attached. All waiting for the device is by events, never for the whole device; mapping
/// the memory of a peer, and forgetting it, may wait for the device's work.
///
/// The first error of CUDA retires the device: it copies nothing further, waits for the copies in
/// flight, reports them failed and logs one error. record_event(), submit() and attach() return
/// kInternal from then on. The engine continues as far as CUDA lets it.
///
/// Without the kernels (a program built without nvcc) all segments are moved directly, no peer is
/// read, and there are no checksums; nor are there any for pages larger than Options::slice_bytes.
///
/// Thread-safe. After a fork the child has no copy thread and no CUDA: there submit() returns kGone
/// and the destructor returns at once.
class CudaDevice final : public Device {
 public:
  struct Options {
    int ordinal = 0;  ///< Among the devices that this process sees.
    /// Device memory for staging, for each direction. With less than 128 MiB the copies wait until
    /// the engine's kernels leave room for ours; more gains nothing.
    std::uint64_t staging_bytes = std::uint64_t{128} << 20;
    /// Bytes of loads that are queued on the device at once, so that complete_early() succeeds
    /// early: 11 ms at 55 GB/s. A cancelled load continues for as long.
    std::uint64_t ahead_bytes = std::uint64_t{640} << 20;
    std::uint64_t slice_bytes = std::uint64_t{32} << 20;  ///< The largest slice.
    /// Multiprocessors that one of our kernels may use at once. 0: all of them.
    unsigned kernel_blocks = 0;
    /// The same for a kernel that copies out of another engine's GPU: more gain nothing there.
    unsigned pull_blocks = 32;
    bool low_priority = false;         ///< Priority of our kernels beside the engine's.
    std::optional<cuda::Path> path{};  ///< Overrides the choice.
    /// Queued or in flight, in each direction; a batch without copies does not count.
    std::size_t max_batches = 4096;
    std::size_t max_events = 4096;  ///< An event is reused after this many others.
    std::uint64_t register_bytes = std::uint64_t{1} << 30;  ///< A power of two.
    unsigned register_threads = 8;
  };

  /// Retains the device's primary context and starts the thread.
  /// Errors: kInvalidArgument for an option out of range, kRefused when there is no such device,
  /// kIo or kOutOfCapacity with CUDA's text, kInternal when no thread can be started.
  static Result<std::unique_ptr<CudaDevice>> create(const Options& options,
                                                    std::shared_ptr<cuda::Driver> driver);

  /// Calls detach(), then ends the thread.
  ~CudaDevice() override;

  /// Errors: those of Device; kOutOfCapacity when the GPU has no memory for staging.
  using Device::attach;
  Result<void> attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                      CompletionSink sink) override;
  void detach() override;
  Result<PeerMemory> share(const PageLayout& layout, std::span<std::byte> guards) override;
  Result<void> add_peer(std::uint64_t peer, const PeerMemory& memory) override;
  void remove_peer(std::uint64_t peer) override;
  Result<Event> record_event(Queue queue) override;
  Result<void> submit(Batch batch) override;
  void cancel(std::uint64_t ticket) override;
  /// Returns false for a batch with checksums, which are computed after its bytes have arrived.
  Result<bool> complete_early(std::uint64_t ticket, Queue queue, Duration within) override;

  /// Whether this program contains the CUDA kernels; false for a build without nvcc.
  [[nodiscard]] static bool has_kernels() noexcept;

  /// Properties of the device, for logs and measurements.
  struct Info {
    std::string name;      ///< "NVIDIA H200, compute capability 9.0"
    bool kernels = false;  ///< Whether the kernels are loaded on it.
    /// For the pool that is or was attached; kStaged if any of its layouts is staged.
    std::optional<cuda::Path> path{};
    /// Measured of the copy engine, if it was; for several segment sizes the lowest.
    std::optional<double> direct_share{};
    Duration register_time{};  ///< To page-lock the last pool.
  };
  [[nodiscard]] Info info() const;

  /// The GPU, for a network that reads and writes its memory, too.
  [[nodiscard]] const std::shared_ptr<cuda::Gpu>& gpu() const noexcept;

 private:
  class Impl;
  explicit CudaDevice(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
