#pragma once
/// \file
/// A GPU of this process as networks use it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <sys/types.h>

#include "base/error.h"
#include "transport/cuda/driver.h"
#include "transport/memory.h"

namespace pegaflow::cuda {

/// A GPU whose primary context, which an engine in this process uses too, is retained as long as
/// this lives. Thread-safe. In a child of fork(), where CUDA is gone, only its destructor works.
class Gpu {
 public:
  /// Errors: kRefused when this process sees no such GPU; CUDA's.
  static Result<std::shared_ptr<Gpu>> open(std::shared_ptr<Driver> driver, int ordinal);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  /// For a Fabric. It keeps this alive.
  [[nodiscard]] static GpuContext context_of(std::shared_ptr<Gpu> gpu);
  /// Makes its context current on the calling thread, for good. Errors: CUDA's.
  Result<void> make_current();

  /// Whether its kernels see what a card has written to its memory only after
  /// show_network_writes(). Errors: kRefused when they do not see it for certain; CUDA's.
  Result<bool> needs_flush();
  /// Makes all that cards have written so far visible to kernels that are launched afterwards.
  /// Errors: CUDA's.
  Result<void> show_network_writes();
  /// Its name in sysfs, "0000:3b:00.0". Errors: CUDA's.
  Result<std::string> pci_address();

  [[nodiscard]] Driver& driver() const noexcept { return *driver_; }
  [[nodiscard]] Context context() const noexcept { return context_; }
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }

 private:
  Gpu(std::shared_ptr<Driver> driver, int ordinal);
  const std::shared_ptr<Driver> driver_;
  const int ordinal_;
  const pid_t process_;  ///< That retained the context.
  Context context_ = nullptr;
};

/// Zeroed memory on a GPU, freed by its destructor. Used by one thread at a time, but a Fabric
/// accesses its bytes.
class GpuMemory {
 public:
  /// Errors: kOutOfCapacity when the GPU has no room; CUDA's.
  static Result<std::unique_ptr<GpuMemory>> create(std::shared_ptr<Gpu> gpu, std::size_t bytes);
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  /// The range, for Fabric::register_region().
  [[nodiscard]] Memory memory() const;
  /// Copies `host` to the bytes from `at` on, or these to `host`, and waits until it is done.
  /// Errors: CUDA's.
  Result<void> write(std::span<const std::byte> host, std::uint64_t at);
  Result<void> read(std::span<std::byte> host, std::uint64_t at);
  Result<void> clear();

 private:
  GpuMemory(std::shared_ptr<Gpu> gpu, std::size_t bytes)
      : gpu_(std::move(gpu)), size_bytes_(bytes) {}
  Result<void> allocate();
  Result<void> copy(Direction direction, const Transfer& transfer);

  const std::shared_ptr<Gpu> gpu_;
  const std::size_t size_bytes_;
  DeviceAddress address_ = 0;
  Stream stream_ = nullptr;
};

}  // namespace pegaflow::cuda
