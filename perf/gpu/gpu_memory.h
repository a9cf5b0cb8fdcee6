#pragma once
/// \file
/// An engine's blocks on a GPU, and plain copies of theirs.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/cuda/driver.h"
#include "transport/device.h"

namespace pegaflow::perf {

/// One allocation a segment, as vLLM has one a layer; block i lies at i * segment_bytes in each.
/// Thread-bound; has streams of its own for what is not the Device's work.
class GpuMemory {
 public:
  /// Errors: what CUDA answered.
  static Result<std::unique_ptr<GpuMemory>> create(std::shared_ptr<cuda::Driver> driver,
                                                   int ordinal, std::uint64_t page_bytes,
                                                   std::uint64_t segment_bytes,
                                                   std::uint64_t blocks);
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory();

  [[nodiscard]] const PageLayout& layout() const noexcept { return *layout_; }

  /// Overwrites all of it, so that a load which copies nothing is seen.
  Result<void> clear();

  /// Whether block `blocks[i]` holds segment 0 of block `origins[i]` by write_pattern(),
  /// all of a page as one, for each i. Errors:
  /// kCorrupt, which names the first that does not; what CUDA answered.
  Result<void> check(std::span<const std::uint32_t> blocks, std::span<const std::uint32_t> origins,
                     std::uint64_t salt);

  /// GB/s of contiguous copies of 64 MiB between page-locked `host` and the GPU for `seconds`;
  /// both: both ways at once, added up.
  enum class Ways : std::uint8_t { kToHost, kToDevice, kBoth };
  Result<double> contiguous_rate(std::span<std::byte> host, Ways ways, double seconds);

 private:
  GpuMemory(std::shared_ptr<cuda::Driver> driver, int ordinal)
      : driver_(std::move(driver)), ordinal_(ordinal) {}
  Result<void> make(std::uint64_t page_bytes, std::uint64_t segment_bytes, std::uint64_t blocks);

  const std::shared_ptr<cuda::Driver> driver_;
  const int ordinal_;
  cuda::Context context_ = nullptr;
  cuda::Stream streams_[2] = {};
  std::vector<cuda::DeviceAddress> allocations_;
  cuda::DeviceAddress targets_[2] = {};  ///< Of contiguous copies.
  std::uint64_t allocation_bytes_ = 0;
  std::unique_ptr<PageLayout> layout_;
};

}  // namespace pegaflow::perf
