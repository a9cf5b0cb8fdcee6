#pragma once
/// \file
/// Ids of the objects that the block store keeps. Plain numbers, so that every part of it can use
/// them.

#include <cstdint>

namespace pegaflow::engine {

/// The number of a frame: the place in the pool for all pages of one block.
/// BlockStore::page_offset() translates it into bytes.
using FrameIndex = std::uint32_t;
inline constexpr FrameIndex kNoFrame = ~FrameIndex{0};

/// One generation of one namespace. A lookup in one never finds blocks of another.
enum class SpaceId : std::uint32_t {};

/// One connection of one process, as the store sees it: it owns claims, pins and reservations.
enum class HolderId : std::uint64_t {};

/// A worker's name for a pin: ascending within its process.
enum class PinId : std::uint64_t {};

/// The store's name for blocks that it lent to another node. Never used again; 0 is not used.
enum class LeaseId : std::uint64_t {};

}  // namespace pegaflow::engine
