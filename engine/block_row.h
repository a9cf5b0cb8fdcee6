#pragma once
/// \file
/// What the store knows of one frame.

#include <cstdint>

#include "base/block_key.h"
#include "engine/block_store.h"
#include "engine/index_list.h"

namespace pegaflow {

enum class SlotState : std::uint8_t {
  kFree = 0,
  kWritten,  ///< A reservation owns it; forgotten ones too: then it is in quarantine.
  kSealed,   ///< Whole. Findable while its space lives and its extent stays.
};

/// What is in one frame; one cache line.
struct alignas(64) Block {
  BlockKey key;
  SpaceId space{};
  IndexLink free;              ///< Its place among the free frames of its extent.
  std::uint32_t holds = 0;     ///< Claims and pins that contain it.
  std::uint32_t owner = 0;     ///< kWritten: the row of its reservation. kSealed: its writer's tag.
  std::uint32_t sealed_s = 0;  ///< When it was sealed, and when it came to rest last, in seconds
  std::uint32_t rested_s = 0;  ///< of whoever says so; kSealed only.
  SlotState state = SlotState::kFree;
  /// find() sees it. Not so a forgotten block whose key was reserved anew, and a condemned one.
  bool indexed = false;
};
static_assert(sizeof(Block) == 64);

}  // namespace pegaflow
