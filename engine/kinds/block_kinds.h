#pragma once
/// \file
/// The kinds of blocks that a model has, and which blocks of each kind a restored prefix needs.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace pegaflow::engine {

/// Which blocks of one kind an engine needs to continue after the first n tokens of a prompt. These
/// rules cover the cache groups of vLLM (`find_longest_cache_hit` of their managers) and the pools
/// of SGLang.
enum class KindRule : std::uint8_t {
  kPrefix,    ///< Full attention, MLA: all blocks of [0, n).
  kTrailing,  ///< Sliding windows: the blocks that cover [n - tokens, n).
  kChunk,     ///< Chunked attention: the blocks of [c, n), c the last multiple of `tokens` up to n.
  kState,     ///< Recurrent states: the one block that ends at n.
};

inline constexpr std::size_t kKindRules = 4;

/// The label of a rule in metrics and reports: "full", "window", "chunk", "state".
std::string_view to_string(KindRule rule) noexcept;

struct BlockKind {
  KindRule rule = KindRule::kPrefix;
  std::uint32_t tokens = 0;  ///< The window without the next token, or the chunk. Else unused.
  std::uint32_t block_tokens = 0;
  bool operator==(const BlockKind&) const = default;
};

/// Consecutive blocks of a prompt, by their number from its beginning.
struct BlockRange {
  std::size_t first = 0;
  std::size_t count = 0;
  [[nodiscard]] std::size_t end() const noexcept { return first + count; }
  bool operator==(const BlockRange&) const = default;
};

/// The kinds of one namespace. Prompts are hashed in units: key i names the first i + 1 units, and
/// block b of a kind has the key of the unit that it ends with.
struct BlockKinds {
  static constexpr std::size_t kMost = 16;

  std::vector<BlockKind> kinds;
  std::uint32_t unit_tokens = 0;
  /// An engine continues only after a multiple of this many tokens.
  std::uint32_t alignment_tokens = 0;

  /// Errors: kInvalidArgument without a kind or with more than kMost; for a size of 0, or a window
  /// or chunk of 0 tokens; for a block that is not a multiple of the unit, or an alignment that is
  /// not a multiple of every block; or for a chunk that is not a multiple of its block.
  [[nodiscard]] Result<void> check() const;

  /// The blocks that a prefix of `tokens` needs; `tokens` is a multiple of the alignment.
  [[nodiscard]] static BlockRange needed(const BlockKind& kind, std::uint64_t tokens);
  /// The position of the key of a block among the keys of the prompt's units.
  [[nodiscard]] std::size_t key_of(const BlockKind& kind, std::size_t block) const {
    return (block + 1) * (kind.block_tokens / unit_tokens) - 1;
  }
  bool operator==(const BlockKinds&) const = default;
};

/// For texts: "full of 16 tokens, window 1008 of 16 tokens; unit 16, alignment 16"; "one kind"
/// without kinds.
std::string to_string(const BlockKinds& kinds);

}  // namespace pegaflow::engine
