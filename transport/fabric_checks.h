#pragma once
/// \file
/// Validation that all backends of Fabric share: options, descriptions of peers, and batches.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/error.h"
#include "transport/fabric.h"

namespace pegaflow {

/// Errors: kInvalidArgument, with option and range, when `value` is outside of it. Both limits are
/// inclusive.
template <typename T>
Result<void> within(const char* name, T value, T minimum, T maximum) {
  if (value >= minimum && value <= maximum) return {};
  return fail(Errc::kInvalidArgument, "{} is {}, outside of {} to {}", name, value, minimum,
              maximum);
}

/// Whether the peer's description is valid, apart from its address and keys. Errors: those of
/// Fabric::connect().
inline Result<void> check_peer(const FabricDescriptor& peer, std::string_view backend,
                               std::size_t most_regions) {
  if (peer.backend != backend) {
    return fail(Errc::kRefused, "the peer's lane is \"{}\", this node's \"{}\"", peer.backend,
                backend);
  }
  if (peer.incarnation.is_none())
    return fail(Errc::kInvalidArgument, "the peer's description has no incarnation");
  if (peer.regions.size() > most_regions) {
    return fail(Errc::kInvalidArgument, "the peer's description has {} regions, more than {}",
                peer.regions.size(), most_regions);
  }
  return {};
}

/// Errors: kInvalidArgument unless the batch has 1 to `most` chunks.
inline Result<void> check_size(const Fabric::Batch& batch, std::size_t most) {
  if (!batch.chunks.empty() && batch.chunks.size() <= most) return {};
  return fail(Errc::kInvalidArgument, "a batch of 1 to {} chunks is expected, this one has {}",
              most, batch.chunks.size());
}

/// The bytes of host memory, for backends that register no other. Errors: those of
/// Fabric::register_region().
inline Result<std::span<std::byte>> host_bytes(const Memory& memory, std::string_view lane) {
  if (memory.kind == MemoryKind::kHost) return std::span(memory.base, memory.bytes);
  return fail(Errc::kRefused, "the lane {} registers host memory only, and not that of GPU {}",
              lane, memory.device);
}

/// Whether a region of that size contains those bytes.
inline bool fits(std::uint64_t region_bytes, std::uint64_t offset, std::uint64_t size_bytes) {
  return size_bytes <= region_bytes && offset <= region_bytes - size_bytes;
}

/// Whether the peer with these regions has the bytes of the chunk.
inline bool has(std::span<const RegionDescriptor> regions, const Fabric::Chunk& chunk) {
  return std::any_of(regions.begin(), regions.end(), [&](const RegionDescriptor& region) {
    return region.region == chunk.remote_region &&
           fits(region.size_bytes, chunk.remote_offset, chunk.size_bytes);
  });
}

}  // namespace pegaflow
