#pragma once
/// \file
/// What every backend of Fabric asks of its options, of a peer's description and of a batch.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/error.h"
#include "transport/fabric.h"

namespace pegaflow {

/// kInvalidArgument that names option and range, unless `value` is in it; both ends are.
template <typename T>
Result<void> within(const char* name, T value, T minimum, T maximum) {
  if (value >= minimum && value <= maximum) return {};
  return fail(Errc::kInvalidArgument, "{} is {}, and may be {} to {}", name, value, minimum,
              maximum);
}

/// Whether a backend can make sense of the peer's description, but for its address and keys.
/// Errors: those of Fabric::connect().
inline Result<void> check_peer(const FabricDescriptor& peer, std::string_view backend,
                               std::size_t most_regions) {
  if (peer.backend != backend) {
    return fail(Errc::kRefused, "the peer's lane is \"{}\", and ours \"{}\"", peer.backend,
                backend);
  }
  if (peer.incarnation.is_none()) return fail(Errc::kInvalidArgument, "the peer has no name");
  if (peer.regions.size() > most_regions) {
    return fail(Errc::kInvalidArgument,
                "the peer says that it has {} regions, and none has over {}", peer.regions.size(),
                most_regions);
  }
  return {};
}

/// Errors: kInvalidArgument unless the batch has 1 to `most` chunks.
inline Result<void> check_size(const Fabric::Batch& batch, std::size_t most) {
  if (!batch.chunks.empty() && batch.chunks.size() <= most) return {};
  return fail(Errc::kInvalidArgument, "a batch has 1 to {} chunks, not {}", most,
              batch.chunks.size());
}

/// Whether a region of that size has those bytes.
inline bool fits(std::uint64_t region_bytes, std::uint64_t offset, std::uint64_t size_bytes) {
  return size_bytes <= region_bytes && offset <= region_bytes - size_bytes;
}

/// Whether the peer with these regions has what the chunk asks for.
inline bool has(std::span<const RegionDescriptor> regions, const Fabric::Chunk& chunk) {
  return std::any_of(regions.begin(), regions.end(), [&](const RegionDescriptor& region) {
    return region.region == chunk.remote_region &&
           fits(region.size_bytes, chunk.remote_offset, chunk.size_bytes);
  });
}

}  // namespace pegaflow
