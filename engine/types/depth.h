#pragma once
/// \file
/// How far behind the start of its prompt a block lies, roughly.

#include <algorithm>
#include <bit>
#include <cstdint>

namespace pegaflow::engine {

/// 0: unknown. 1: fewer than 3 blocks are before it; 2: fewer than 15; 3: fewer than 63; each
/// further step is four times as far, and 7 is all the rest.
using Depth = std::uint8_t;
inline constexpr Depth kUnknownDepth = 0;
inline constexpr Depth kMostDepth = 7;

/// The depth that a client sends for a block: 1 + log2(1 + blocks before it), rounded down; 0:
/// unknown. Any byte is accepted.
[[nodiscard]] constexpr std::uint8_t sent_depth(std::uint32_t blocks_before) noexcept {
  return static_cast<std::uint8_t>(std::bit_width(std::uint64_t{blocks_before} + 1));
}
[[nodiscard]] constexpr Depth depth_from_sent(std::uint8_t sent) noexcept {
  if (sent == 0) return kUnknownDepth;
  return static_cast<Depth>(std::min(1 + (sent - 1) / 2, int{kMostDepth}));
}

}  // namespace pegaflow::engine
