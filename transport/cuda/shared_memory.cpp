#include "transport/cuda/shared_memory.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/os/descriptor_box.h"

namespace pegaflow::cuda {
namespace {

/// Why CUDA does not share memory by a handle.
struct Refusal {
  Driver& driver;
  Status by_handle;
};

tl::unexpected<Error> unshareable(const Refusal& refusal, DeviceAddress address,
                                  Status by_descriptor) {
  return fail(Errc::kRefused,
              "CUDA cannot share the memory at {:#x} with other processes, by a handle: {}, or by "
              "a descriptor: {}; it can if the engine has no sleep mode",
              address, refusal.driver.describe(refusal.by_handle),
              refusal.driver.describe(by_descriptor));
}

/// A segment at its offset from `base`.
Segment at_offset(const Segment& segment, DeviceAddress base) {
  const DeviceAddress offset = std::bit_cast<std::uintptr_t>(segment.base) - base;
  // An offset, not an address. NOLINTNEXTLINE(performance-no-int-to-ptr)
  return {reinterpret_cast<std::byte*>(offset), segment.block_stride_bytes, segment.size_bytes};
}

/// Addresses from `begin` to `end`, all of them mapped, which allocations of these sizes cover.
struct Range {
  DeviceAddress begin = 0;
  DeviceAddress end = 0;
  std::vector<std::uint64_t> sizes{};
};

/// Finds the allocations that segments lie in, and exports each once.
class Exporter {
 public:
  explicit Exporter(const Refusal& refusal) : refusal_(refusal) {}

  /// The range that contains these addresses.
  Result<std::uint32_t> add(DeviceAddress begin, DeviceAddress end) {
    const auto known = std::ranges::find_if(
        ranges_, [&](const Range& one) { return begin >= one.begin && end <= one.end; });
    if (known != ranges_.end()) return static_cast<std::uint32_t>(known - ranges_.begin());
    // Only the last one grows: descriptors are in the order of the ranges.
    const bool grows =
        !ranges_.empty() && begin >= ranges_.back().begin && begin <= ranges_.back().end;
    if (!grows) ranges_.push_back({.begin = begin, .end = begin, .sizes = {}});
    while (ranges_.back().end < end) PEGA_TRY(extend(ranges_.back()));
    return static_cast<std::uint32_t>(ranges_.size() - 1);
  }

  [[nodiscard]] DeviceAddress begin_of(std::uint32_t range) const { return ranges_[range].begin; }

  Result<MappedMemory> close(std::vector<std::uint32_t> range_of) {
    MappedMemory memory{.ranges = {}, .range_of = std::move(range_of), .descriptors = {}};
    PEGA_TRY_LET(UniqueFd box, box_.close());
    memory.descriptors = std::make_shared<const UniqueFd>(std::move(box));
    for (Range& range : ranges_) memory.ranges.push_back(std::move(range.sizes));
    return memory;
  }

 private:
  Result<void> extend(Range& range) {
    UniqueFd descriptor;
    DeviceAddress base = 0;
    std::uint64_t bytes = 0;
    const Status status = refusal_.driver.export_mapped(range.end, descriptor, base, bytes);
    if (status != kSuccess) return unshareable(refusal_, range.end, status);
    if (range.sizes.empty()) range.begin = base;
    range.end = base + bytes;
    range.sizes.push_back(bytes);
    return box_.add(std::move(descriptor));
  }

  const Refusal refusal_;
  std::vector<Range> ranges_;
  DescriptorBox box_;
};

Result<PeerMemory> share_mapped(const Refusal& refusal, const PageLayout& layout) {
  PeerMemory memory{.segments = {}, .block_count = layout.block_count()};
  Exporter exporter(refusal);
  std::vector<std::uint32_t> range_of;
  for (const Segment& segment : layout.segments()) {
    const auto begin = std::bit_cast<std::uintptr_t>(segment.base);
    const std::uint64_t bytes = extent_of(segment, layout.block_count());
    PEGA_TRY_LET(const std::uint32_t range, exporter.add(begin, begin + bytes));
    memory.segments.push_back(at_offset(segment, exporter.begin_of(range)));
    range_of.push_back(range);
  }
  PEGA_TRY_LET(memory.mapped, exporter.close(std::move(range_of)));
  return memory;
}

}  // namespace

Result<PeerMemory> share_memory(Driver& driver, const PageLayout& layout) {
  PeerMemory memory{.segments = {}, .block_count = layout.block_count()};
  for (const Segment& segment : layout.segments()) {
    DeviceAddress base = 0;
    const Status status = driver.export_memory(std::bit_cast<std::uintptr_t>(segment.base),
                                               memory.handles.emplace_back(), base);
    if (status != kSuccess) return share_mapped({driver, status}, layout);
    memory.segments.push_back(at_offset(segment, base));
  }
  return memory;
}

}  // namespace pegaflow::cuda
