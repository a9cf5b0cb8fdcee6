#pragma once
/// \file
/// The policies there are, by name.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace pegaflow::engine {

enum class EvictionKind : std::uint8_t {
  kLru,          ///< The block longest at rest.
  kSlru,         ///< New blocks before those that were used again.
  kS3Fifo,       ///< New blocks that nobody used while they passed a small queue.
  kWeightedLru,  ///< The block longest at rest for the uses that it had.
};

/// The name of a policy, as options, logs and metrics say it.
[[nodiscard]] std::string_view to_string(EvictionKind kind);
/// Errors: kInvalidArgument that lists the names there are.
Result<EvictionKind> eviction_kind(std::string_view name);
/// All names, for people: "a, b or c".
[[nodiscard]] std::string eviction_names();
inline constexpr std::array kEvictionKinds = {EvictionKind::kWeightedLru, EvictionKind::kLru,
                                              EvictionKind::kSlru, EvictionKind::kS3Fifo};
/// Above LRU wherever it was measured, or within 2 % of it; see docs/decisions/0006.
inline constexpr EvictionKind kDefaultEviction = EvictionKind::kWeightedLru;

}  // namespace pegaflow::engine
