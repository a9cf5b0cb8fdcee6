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

/// A group of layers: each has so many bytes of a block, in an allocation of its own.
struct GpuGroup {
  std::uint64_t segments = 0;
  std::uint64_t segment_bytes = 0;
  [[nodiscard]] std::uint64_t page_bytes() const noexcept { return segments * segment_bytes; }
};

/// One allocation per segment, as vLLM has one per layer. Several groups lie over each other, as
/// vLLM lays them out: segment k of each is in allocation k, and block i at i * the largest segment
/// of all groups. Thread-bound; has its own streams for copies outside the Device.
class GpuMemory {
 public:
  /// With a layout for each group. Errors: CUDA's; kInvalidArgument for an empty group or no block.
  static Result<std::unique_ptr<GpuMemory>> create(std::shared_ptr<cuda::Driver> driver,
                                                   int ordinal, std::span<const GpuGroup> groups,
                                                   std::uint64_t blocks);
  /// The same with one group.
  static Result<std::unique_ptr<GpuMemory>> create(std::shared_ptr<cuda::Driver> driver,
                                                   int ordinal, std::uint64_t page_bytes,
                                                   std::uint64_t segment_bytes,
                                                   std::uint64_t blocks);
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory();

  [[nodiscard]] std::span<const PageLayout> layouts() const noexcept { return layouts_; }
  [[nodiscard]] const PageLayout& layout() const noexcept { return layouts_.front(); }

  /// Overwrites all blocks, so that a load that copies nothing is detected.
  Result<void> clear();

  /// A block of a group, and the page that it should hold.
  struct Expected {
    std::size_t layout = 0;
    std::uint32_t block = 0;
    std::uint32_t origin = 0;  ///< The page has the pattern of pattern_seed(salt, origin).
  };
  /// Checks that each block holds its page, which write_pattern() wrote as one segment.
  /// Errors: kCorrupt, which names the first block that differs; CUDA's.
  Result<void> check(std::span<const Expected> pages, std::uint64_t salt);

  /// GB/s of contiguous copies between page-locked `host` and the GPU for `seconds`, of 64 MiB
  /// each, or half of a smaller `host`; kBoth: the sum of both directions at once.
  enum class Directions : std::uint8_t { kToHost, kToDevice, kBoth };
  Result<double> contiguous_rate(std::span<std::byte> host, Directions directions, double seconds);

 private:
  GpuMemory(std::shared_ptr<cuda::Driver> driver, int ordinal)
      : driver_(std::move(driver)), ordinal_(ordinal) {}
  Result<void> make(std::span<const GpuGroup> groups, std::uint64_t blocks);

  const std::shared_ptr<cuda::Driver> driver_;
  const int ordinal_;
  cuda::Context context_ = nullptr;
  cuda::Stream streams_[2] = {};
  std::vector<cuda::DeviceAddress> allocations_;
  cuda::DeviceAddress targets_[2] = {};  ///< Memory of contiguous copies.
  std::uint64_t allocation_bytes_ = 0;
  std::vector<PageLayout> layouts_;
};

}  // namespace pegaflow::perf
