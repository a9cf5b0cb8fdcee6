#pragma once
/// \file
/// The pool of another node as memory that a device reads.

#include <cstdint>
#include <utility>

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/device.h"
#include "transport/region.h"

namespace pegaflow {

/// A pool of pages that begin at multiples of kSlotAlignment, as a peer of an engine with that
/// layout: block n is the page at n * kSlotAlignment, and there are no guards. The pool is the
/// first region of `fabric`. Errors: kInvalidArgument when it has no region, or a page does not
/// fit.
inline Result<PeerMemory> pool_as_peer(const PageLayout& layout, const FabricDescriptor& fabric) {
  if (fabric.regions.empty() || fabric.regions.front().size_bytes < layout.page_bytes()) {
    return fail(Errc::kInvalidArgument, "the pool of another node has no page of {} bytes",
                layout.page_bytes());
  }
  const RegionDescriptor& pool = fabric.regions.front();
  PeerMemory memory{.segments = {},
                    .block_count = 1 + (pool.size_bytes - layout.page_bytes()) / kSlotAlignment};
  NetworkMemory network{.fabric = fabric};
  std::uint64_t offset = 0;
  for (const Segment& segment : layout.segments()) {
    memory.segments.push_back({nullptr, kSlotAlignment, segment.size_bytes});
    network.segments.push_back({.region = pool.region, .offset = offset});
    offset += segment.size_bytes;
  }
  memory.network = std::move(network);
  return memory;
}

}  // namespace pegaflow
