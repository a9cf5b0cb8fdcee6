#pragma once
/// \file
/// Arithmetic of reads from the memory of engines on other hosts: where blocks lie in the regions
/// of a Fabric, and the chunks of a read.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/device.h"
#include "transport/fabric.h"
#include "transport/memory.h"
#include "transport/region.h"

namespace pegaflow::network {

/// A guard is a 64-bit word.
inline constexpr std::uint64_t kGuardBytes = sizeof(std::uint64_t);

/// The memory of the layout's blocks, from the first to the last byte of each segment, in ascending
/// order. Segments whose memory overlaps have one range together: the K and V of one tensor, or the
/// layers of one allocation. So have those whose memory adjoins in ordinary memory; on a GPU they
/// may be two allocations, which cannot be registered as one. Errors: kInvalidArgument when a
/// segment extends beyond all addresses.
Result<std::vector<std::span<std::byte>>> extents_of(const PageLayout& layout,
                                                     MemoryKind kind = MemoryKind::kHost);

/// Registered memory of this process.
struct LocalRegion {
  std::span<std::byte> memory;
  RegionId region{};
};

/// The place of block 0 of each segment. Errors: kInvalidArgument when a segment is in none of the
/// regions.
Result<std::vector<NetworkMemory::Place>> places_of(const PageLayout& layout,
                                                    std::span<const LocalRegion> regions);

/// The blocks and guards of a peer, in the regions of its fabric.
struct RemoteBlocks {
  struct Segment {
    NetworkMemory::Place place;  ///< That of block 0.
    std::uint64_t block_stride_bytes = 0;
  };
  std::vector<Segment> segments;
  std::uint64_t block_count = 0;
  RegionId guards{};
  std::uint64_t guard_count = 0;  ///< 0: it has none.
};

/// Validates what a peer has sent, beside the layout of the reader; `memory.network` is set.
/// Errors: kRefused when its segments differ in number or size from the layout's; kInvalidArgument
/// when a block or the guards are outside of the regions that it describes.
Result<RemoteBlocks> remote_blocks(const PeerMemory& memory, const PageLayout& layout);

/// A merged chunk counts as arrived only as a whole: this much of a batch that fails may have
/// arrived in vain.
inline constexpr std::uint64_t kMostMergedBytes = std::uint64_t{1} << 20;

/// Appends `chunk`, or extends the last one if both adjoin on either side and the sum is at most
/// kMostMergedBytes.
void append(std::vector<Fabric::Chunk>& chunks, const Fabric::Chunk& chunk);

/// The chunks of a list of copies, in its order.
struct PagePlan {
  std::vector<Fabric::Chunk> chunks;
  /// By copy: its last chunk. When all chunks up to that one have arrived, so has the page.
  std::vector<std::size_t> last_chunks;
};

/// `own`: places_of() the layout. The blocks are in the range of the layout and of the peer.
PagePlan plan_pages(std::span<const Device::Copy> copies, const PageLayout& layout,
                    std::span<const NetworkMemory::Place> own, const RemoteBlocks& remote);

}  // namespace pegaflow::network
