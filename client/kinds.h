#pragma once
/// \file
/// The kinds of blocks of a model, as an engine registers them, and ranges of their blocks.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/page_layout.h"

namespace pegaflow {

/// The most kinds of one namespace.
inline constexpr std::size_t kMaxKinds = 16;

/// Which blocks of a kind an engine needs to continue after the first n tokens of a prompt. The
/// values have the numbers of the wire.
enum class BlockRule : std::uint8_t {
  kPrefix,    ///< Full attention, MLA: all blocks of [0, n).
  kTrailing,  ///< Sliding windows: the blocks that cover [n - tokens, n).
  kChunk,     ///< Chunked attention: the blocks of [c, n), c the last multiple of `tokens` up to n.
  kState,     ///< Recurrent states: the one block that ends at n.
};

/// Blocks of equal rule and size, as one rank has them.
struct MoverKind {
  BlockRule rule = BlockRule::kPrefix;
  std::uint32_t tokens = 0;  ///< The window without the next token, or the chunk. Else 0.
  std::uint32_t block_tokens = 0;
  /// The engine's cache groups of this kind, each with block numbers of its own. A page has the
  /// members' pages one behind the other. They may overlay each other's memory, and that of other
  /// kinds. Empty: this rank has no layer of the kind, and neither saves nor loads it.
  std::vector<PageLayout> members{};
};

/// The kinds of a model with several.
struct MoverKinds {
  std::vector<MoverKind> kinds;        ///< 1 to kMaxKinds; kind 0 is the prefix if there is one.
  std::uint32_t unit_tokens = 0;       ///< Prompts are hashed in units of so many tokens.
  std::uint32_t alignment_tokens = 0;  ///< An engine continues only after a multiple of this many.
};

/// Consecutive blocks of one kind, by their number from the beginning of the prompt.
struct KindRange {
  std::size_t kind = 0;
  std::size_t first = 0;
  std::size_t count = 0;
  [[nodiscard]] std::size_t end() const noexcept { return first + count; }
  bool operator==(const KindRange&) const = default;
};

/// Claimed blocks, and the engine's blocks that they are loaded into.
struct LoadRange {
  KindRange range;
  /// Those of all members for the first block, then for the next one: count x members.
  std::span<const std::uint32_t> blocks;
};

}  // namespace pegaflow
