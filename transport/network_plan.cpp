#include "transport/network_plan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>

#include "transport/device_checks.h"
#include "transport/fabric_checks.h"

namespace pegaflow::network {
namespace {

/// The bytes of a segment from its first to its last block; no value: beyond 64 bits.
std::optional<std::uint64_t> extent_of(std::uint64_t block_count, const Segment& segment) {
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(block_count - 1, segment.block_stride_bytes, &bytes) ||
      __builtin_add_overflow(bytes, segment.size_bytes, &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

std::uintptr_t begin_of(std::span<const std::byte> memory) {
  return std::bit_cast<std::uintptr_t>(memory.data());
}
std::uintptr_t end_of(std::span<const std::byte> memory) {
  return begin_of(memory) + memory.size();
}

const RegionDescriptor* find_region(const FabricDescriptor& fabric, RegionId region) {
  const auto found = std::ranges::find(fabric.regions, region, &RegionDescriptor::region);
  return found == fabric.regions.end() ? nullptr : &*found;
}

Result<void> check_place(const PeerMemory& memory, std::size_t segment) {
  const NetworkMemory::Place& place = memory.network->segments[segment];
  const auto number = static_cast<std::uint32_t>(place.region);
  const RegionDescriptor* const region = find_region(memory.network->fabric, place.region);
  if (region == nullptr) {
    return fail(Errc::kInvalidArgument,
                "add peer: segment {} is in region {}, which its fabric does not describe", segment,
                number);
  }
  const std::optional<std::uint64_t> extent =
      extent_of(memory.block_count, memory.segments[segment]);
  if (!extent || !fits(region->size_bytes, place.offset, *extent)) {
    return fail(
        Errc::kInvalidArgument,
        "add peer: segment {} has {} blocks of {} bytes at a stride of {} from offset {} on, "
        "and region {} has {} bytes",
        segment, memory.block_count, memory.segments[segment].size_bytes,
        memory.segments[segment].block_stride_bytes, place.offset, number, region->size_bytes);
  }
  return {};
}

}  // namespace

Result<std::vector<std::span<std::byte>>> extents_of(const PageLayout& layout, MemoryKind kind) {
  std::vector<std::span<std::byte>> extents;
  for (const Segment& segment : layout.segments()) {
    const std::optional<std::uint64_t> bytes = extent_of(layout.block_count(), segment);
    const auto base = std::bit_cast<std::uintptr_t>(segment.base);
    if (!bytes || *bytes > std::numeric_limits<std::uintptr_t>::max() - base) {
      return fail(Errc::kInvalidArgument,
                  "{} blocks of {} bytes from address {:#x} on are beyond all addresses",
                  layout.block_count(), segment.block_stride_bytes, base);
    }
    extents.emplace_back(segment.base, *bytes);
  }
  std::ranges::sort(extents, {}, begin_of);
  std::size_t last = 0;
  for (const std::span<std::byte> next : extents) {
    std::span<std::byte>& so_far = extents[last];
    const bool adjoins = begin_of(next) == end_of(so_far);
    if (begin_of(next) > end_of(so_far) || (adjoins && kind == MemoryKind::kCuda)) {
      extents[++last] = next;
    } else if (end_of(next) > end_of(so_far)) {
      so_far = {so_far.data(), end_of(next) - begin_of(so_far)};
    }
  }
  extents.resize(last + 1);
  return extents;
}

Result<std::vector<NetworkMemory::Place>> places_of(const PageLayout& layout,
                                                    std::span<const LocalRegion> regions) {
  std::vector<NetworkMemory::Place> places;
  for (std::size_t i = 0; i < layout.segments().size(); ++i) {
    const Segment& segment = layout.segments()[i];
    const auto base = std::bit_cast<std::uintptr_t>(segment.base);
    const std::optional<std::uint64_t> bytes = extent_of(layout.block_count(), segment);
    const auto holds_it = [&](const LocalRegion& region) {
      return bytes && base >= begin_of(region.memory) &&
             fits(region.memory.size(), base - begin_of(region.memory), *bytes);
    };
    const auto found = std::ranges::find_if(regions, holds_it);
    if (found == regions.end()) {
      return fail(Errc::kInvalidArgument,
                  "segment {} at {:#x} is not in the memory that was registered with the network",
                  i, base);
    }
    places.push_back({found->region, base - begin_of(found->memory)});
  }
  return places;
}

Result<RemoteBlocks> remote_blocks(const PeerMemory& memory, const PageLayout& layout) {
  PEGA_TRY(device::check_peer_pages(memory, layout));
  const NetworkMemory& network = *memory.network;
  if (network.segments.size() != memory.segments.size()) {
    return fail(Errc::kInvalidArgument, "add peer: {} places for {} segments",
                network.segments.size(), memory.segments.size());
  }
  RemoteBlocks blocks{.segments = {}, .block_count = memory.block_count};
  if (network.guards) {
    const RegionDescriptor* const guards = find_region(network.fabric, *network.guards);
    if (guards == nullptr) {
      return fail(Errc::kInvalidArgument,
                  "add peer: its guards are in region {}, which its fabric does not describe",
                  static_cast<std::uint32_t>(*network.guards));
    }
    if (guards->size_bytes % kGuardBytes != 0) {
      return fail(Errc::kInvalidArgument, "add peer: its guards have {} bytes, no multiple of {}",
                  guards->size_bytes, kGuardBytes);
    }
    blocks.guards = *network.guards;
    blocks.guard_count = guards->size_bytes / kGuardBytes;
  }
  for (std::size_t i = 0; i < memory.segments.size(); ++i) {
    PEGA_TRY(check_place(memory, i));
    blocks.segments.push_back({network.segments[i], memory.segments[i].block_stride_bytes});
  }
  return blocks;
}

void append(std::vector<Fabric::Chunk>& chunks, const Fabric::Chunk& chunk) {
  if (!chunks.empty()) {
    Fabric::Chunk& last = chunks.back();
    if (last.remote_region == chunk.remote_region && last.local_region == chunk.local_region &&
        last.remote_offset + last.size_bytes == chunk.remote_offset &&
        last.local_offset + last.size_bytes == chunk.local_offset &&
        last.size_bytes + chunk.size_bytes <= kMostMergedBytes) {
      last.size_bytes += chunk.size_bytes;
      return;
    }
  }
  chunks.push_back(chunk);
}

PagePlan plan_pages(std::span<const Device::Copy> copies, const PageLayout& layout,
                    std::span<const NetworkMemory::Place> own, const RemoteBlocks& remote) {
  const std::span<const Segment> segments = layout.segments();
  PagePlan plan;
  plan.last_chunks.reserve(copies.size());
  for (const Device::Copy& copy : copies) {
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const RemoteBlocks::Segment& from = remote.segments[i];
      append(plan.chunks,
             {.remote_region = from.place.region,
              .remote_offset = from.place.offset + copy.pool_offset * from.block_stride_bytes,
              .local_region = own[i].region,
              .local_offset = own[i].offset + copy.block * segments[i].block_stride_bytes,
              .size_bytes = segments[i].size_bytes});
    }
    plan.last_chunks.push_back(plan.chunks.size() - 1);
  }
  return plan;
}

}  // namespace pegaflow::network
