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

/// The Device of engines that keep their KV cache on a GPU. It copies inside the engine's process
/// and in its context: a second process would share the GPU by time slices and take 12 to 50 % of
/// the engine's speed.
///
/// One thread drives both directions, which run side by side; loads are queued first. Segments of
/// some MiB are moved by the copy engine as they are. Smaller ones go through staging: a kernel
/// gathers pages in device memory, and the copy engine moves them as a whole. Which of the two is
/// chosen by the layout, between 256 KiB and 2 MiB by what the copy engine was seen to do when the
/// pool was attached. Nothing waits for the device but by events, and never for the whole of it.
///
/// The first error of CUDA retires the device: nothing is copied any more, what was under way is
/// waited for and reported failed, one error line; record_event(), submit() and attach() say
/// kInternal from then on. The engine goes on as far as CUDA lets it.
///
/// Without the kernels (a program built without nvcc) all is moved directly, and no checksum is
/// taken; nor is one of a page larger than Options::slice_bytes.
///
/// Thread-safe. After a fork the child has no copy thread and no CUDA: there submit() says kGone
/// and the destructor returns at once.
class CudaDevice final : public Device {
 public:
  struct Options {
    int ordinal = 0;  ///< Among the devices that this process sees.
    /// Device memory for staging, for each direction. With less than 128 MiB the copies wait for
    /// the engine's kernels to let ours in; more wins nothing.
    std::uint64_t staging_bytes = std::uint64_t{128} << 20;
    /// Of loads, queued on the device at once, so that follow() can be said early: 11 ms at
    /// 55 GB/s. A load that is cancelled goes on for as long.
    std::uint64_t ahead_bytes = std::uint64_t{640} << 20;
    std::uint64_t slice_bytes = std::uint64_t{32} << 20;  ///< Copied at a time.
    /// Multiprocessors that a kernel of ours may be on at once. 0: all of them.
    unsigned kernel_blocks = 0;
    bool low_priority = false;         ///< Of the kernels, beside those of the engine.
    std::optional<cuda::Path> path{};  ///< Not chosen, but told.
    std::size_t max_batches = 4096;    ///< Queued or under way, in each direction.
    std::size_t max_events = 4096;     ///< An event is used again after so many others.
    std::uint64_t register_bytes = std::uint64_t{1} << 30;  ///< A power of two.
    unsigned register_threads = 8;
  };

  /// Takes the device's primary context and starts the thread.
  /// Errors: kInvalidArgument for an option without sense, kRefused when there is no such device,
  /// kIo or kOutOfCapacity in CUDA's words, kInternal when no thread can start.
  static Result<std::unique_ptr<CudaDevice>> create(const Options& options,
                                                    std::shared_ptr<cuda::Driver> driver);

  /// detach(), then ends the thread.
  ~CudaDevice() override;

  /// Errors: those of the seam; kOutOfCapacity when the GPU has no memory for staging.
  Result<void> attach(const PageLayout& layout, std::span<std::byte> pool,
                      CompletionSink sink) override;
  void detach() override;
  Result<Event> record_event(Queue queue) override;
  Result<void> submit(Batch batch) override;
  void cancel(std::uint64_t ticket) override;
  /// Not for a batch with checksums, which are taken when its bytes are there.
  Result<bool> complete_early(std::uint64_t ticket, Queue queue, Duration within) override;

  /// True if this program contains the CUDA kernels; false for a build without nvcc.
  [[nodiscard]] static bool has_kernels() noexcept;

  /// What is known of the device, for logs and measurements.
  struct Info {
    std::string name;                      ///< "NVIDIA H200, compute capability 9.0"
    bool kernels = false;                  ///< Whether there are any for it.
    std::optional<cuda::Path> path{};      ///< Of the pool that is or was attached.
    std::optional<double> direct_share{};  ///< Seen of the copy engine, if it was looked at.
    Duration register_time{};              ///< To page-lock the last pool.
  };
  [[nodiscard]] Info info() const;

 private:
  class Impl;
  explicit CudaDevice(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
