#pragma once
/// \file
/// The eviction policies, by name.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace pegaflow::engine {

enum class EvictionKind : std::uint8_t {
  kLru,          ///< The block that has been evictable for longest.
  kSlru,         ///< New blocks before those that were used again.
  kS3Fifo,       ///< New blocks that were not used while they passed a small queue.
  kWeightedLru,  ///< The block that has been evictable for longest in relation to its uses.
  kAdaptive,     ///< The same, or LRU, and new blocks may be refused: whatever finds most.
};

/// The name of a policy in options, logs and metrics.
[[nodiscard]] std::string_view to_string(EvictionKind kind);
/// Errors: kInvalidArgument that lists the known names.
Result<EvictionKind> eviction_kind(std::string_view name);
/// All names, for messages: "a, b or c".
[[nodiscard]] std::string eviction_names();
inline constexpr std::array kEvictionKinds = {EvictionKind::kWeightedLru, EvictionKind::kLru,
                                              EvictionKind::kSlru, EvictionKind::kS3Fifo,
                                              EvictionKind::kAdaptive};
/// Better than LRU wherever it was measured, or within 2 % of it; see docs/decisions/0006.
inline constexpr EvictionKind kDefaultEviction = EvictionKind::kWeightedLru;

}  // namespace pegaflow::engine
