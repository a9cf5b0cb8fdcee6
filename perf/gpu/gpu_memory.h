#pragma once
/// \file
/// An engine's blocks on a GPU, and plain copies of them.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/cuda/driver.h"
#include "transport/device.h"

namespace pegaflow::perf {

/// One allocation per segment, as vLLM has one per layer; block i lies at i * segment_bytes of
/// each. Thread-bound; has its own streams for copies outside the Device.
class GpuMemory {
 public:
  /// Errors: CUDA's.
  static Result<std::unique_ptr<GpuMemory>> create(std::shared_ptr<cuda::Driver> driver,
                                                   int ordinal, std::uint64_t page_bytes,
                                                   std::uint64_t segment_bytes,
                                                   std::uint64_t blocks);
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory();

  [[nodiscard]] const PageLayout& layout() const noexcept { return *layout_; }

  /// Overwrites all blocks, so that a load that copies nothing is detected.
  Result<void> clear();

  /// Checks that each block `blocks[i]` holds the page of block `origins[i]`, which write_pattern()
  /// wrote as one segment. Errors: kCorrupt, which names the first block that differs; CUDA's.
  Result<void> check(std::span<const std::uint32_t> blocks, std::span<const std::uint32_t> origins,
                     std::uint64_t salt);

  /// GB/s of contiguous copies of 64 MiB between page-locked `host` and the GPU for `seconds`;
  /// kBoth: the sum of both directions at once.
  enum class Directions : std::uint8_t { kToHost, kToDevice, kBoth };
  Result<double> contiguous_rate(std::span<std::byte> host, Directions directions, double seconds);

 private:
  GpuMemory(std::shared_ptr<cuda::Driver> driver, int ordinal)
      : driver_(std::move(driver)), ordinal_(ordinal) {}
  Result<void> make(std::uint64_t page_bytes, std::uint64_t segment_bytes, std::uint64_t blocks);

  const std::shared_ptr<cuda::Driver> driver_;
  const int ordinal_;
  cuda::Context context_ = nullptr;
  cuda::Stream streams_[2] = {};
  std::vector<cuda::DeviceAddress> allocations_;
  cuda::DeviceAddress targets_[2] = {};  ///< Memory of contiguous copies.
  std::uint64_t allocation_bytes_ = 0;
  std::unique_ptr<PageLayout> layout_;
};

}  // namespace pegaflow::perf
