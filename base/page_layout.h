#pragma once
/// \file
/// The positions of a block's pieces in the engine's memory and in one contiguous page.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"

namespace pegaflow {

/// One run of bytes that every block has, for example one layer's K and V.
struct Segment {
  std::byte* base = nullptr;             ///< The segment's address in block 0.
  std::uint64_t block_stride_bytes = 0;  ///< From one block to the next.
  std::uint64_t size_bytes = 0;          ///< The segment's size in one block.
};

/// The map between blocks in an engine's memory and pages.
///
/// A page is the concatenation of a block's segments in the order given (the prefix sum over layer
/// and segment), so that one DMA, one RDMA read or one SSD read moves a whole block.
/// Immutable. Does not own the engine's memory.
class PageLayout {
 public:
  /// Errors: kInvalidArgument when there is no segment or block, a segment is empty or has no base,
  /// strides make blocks overlap, or a page would pass 1 GiB.
  static Result<PageLayout> create(std::vector<Segment> segments, std::uint64_t block_count);

  [[nodiscard]] std::span<const Segment> segments() const noexcept { return segments_; }
  [[nodiscard]] std::uint64_t block_count() const noexcept { return block_count_; }
  [[nodiscard]] std::uint64_t page_bytes() const noexcept { return page_bytes_; }

 private:
  std::vector<Segment> segments_;
  std::uint64_t block_count_ = 0;
  std::uint64_t page_bytes_ = 0;
};

/// Larger pages are rejected: no engine has them, and an extent would be mostly waste.
inline constexpr std::uint64_t kMaxPageBytes = std::uint64_t{1} << 30;

/// Slots are multiples of this: the unit of direct I/O and of the smallest page of memory.
inline constexpr std::uint64_t kSlotAlignment = 4096;

/// `page_bytes` rounded up to the slot that holds it.
constexpr std::uint64_t slot_bytes_for(std::uint64_t page_bytes) noexcept {
  return (page_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

}  // namespace pegaflow
