#pragma once
/// \file
/// The memory of an engine's GPU, as other processes of this host map it.

#include <cstdint>

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/cuda/driver.h"
#include "transport/device.h"

namespace pegaflow::cuda {

/// The bytes of a segment from its first to its last block, of which there is one at least.
inline std::uint64_t extent_of(const Segment& segment, std::uint64_t block_count) {
  return (block_count - 1) * segment.block_stride_bytes + segment.size_bytes;
}

/// The memory of a layout as add_peer() of other processes takes it: by CUDA's IPC handles, or
/// where there are none by descriptors of the allocations. With the context current.
/// Errors: kRefused with CUDA's reason for memory that has neither, and when so many descriptors
/// are too many for this process.
Result<PeerMemory> share_memory(Driver& driver, const PageLayout& layout);

}  // namespace pegaflow::cuda
