#pragma once
/// \file
/// The search for the longest prefix of a prompt that a cache can restore, over all kinds of
/// blocks.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/kinds/block_kinds.h"

namespace pegaflow::engine {

/// Which blocks of a prompt a cache has.
class BlockPresence {
 public:
  BlockPresence() = default;
  BlockPresence(const BlockPresence&) = delete;
  BlockPresence& operator=(const BlockPresence&) = delete;
  virtual ~BlockPresence() = default;

  /// Bit i tells whether block `first` + i of the kind is present, for `count` blocks, at most 64;
  /// the other bits are 0. The search calls it at most once for each block.
  virtual std::uint64_t present(std::size_t kind, std::size_t first, std::size_t count) = 0;
};

/// Searches one prompt, at one moment. States and the windows at their different boundaries exist
/// independently of each other, so a prompt may be restorable at 8,192 tokens but not at 4,096.
///
/// A search asks for each block at most once: longest() for the blocks of prefix kinds up to the
/// first missing one, and for those of the other kinds from the right end, in groups of 64, until a
/// boundary satisfies every rule. `kinds` was checked, and outlives the object, as does `presence`.
class RestorableSearch {
 public:
  /// `units` is the number of hashed units of the prompt.
  RestorableSearch(const BlockKinds& kinds, std::size_t units, BlockPresence& presence);

  /// The longest restorable prefix, in tokens; 0 when none is longer than `local_tokens`, a
  /// multiple of the alignment. The engine has that many tokens itself: their blocks of prefix
  /// kinds need not be present. Windows, chunks and states are needed whole, because the engine's
  /// own are those of another boundary.
  [[nodiscard]] std::uint64_t longest(std::uint64_t local_tokens = 0);

  /// A part of a prompt that the prefix kinds have and longest() did not restore.
  struct Shortened {
    std::size_t kind = 0;      ///< The first kind without a block that its rule needs.
    std::uint64_t tokens = 0;  ///< The difference of both lengths, beyond `local_tokens`.
  };
  /// After longest(); no value if no other kind made the prefix shorter, or without prefix kinds.
  [[nodiscard]] const std::optional<Shortened>& shortened() const noexcept { return shortened_; }

  /// Every restorable prefix beyond `local_tokens`, in tokens, in ascending order.
  [[nodiscard]] std::vector<std::uint64_t> all(std::uint64_t local_tokens = 0);

  /// The blocks of a kind that a cache must deliver for a prefix of `tokens`, beyond those of
  /// `local_tokens`.
  [[nodiscard]] BlockRange wanted(std::size_t kind, std::uint64_t tokens,
                                  std::uint64_t local_tokens) const;

 private:
  /// The blocks of one kind, asked for in groups of 64.
  struct Known {
    std::size_t blocks = 0;
    std::vector<std::uint64_t> present;
    std::vector<bool> asked;
    /// The blocks [from, to) are present: the last range that passed.
    std::size_t from = 0;
    std::size_t to = 0;
  };

  [[nodiscard]] bool is_present(std::size_t kind, std::size_t block);
  /// The end of the run of present blocks that begins at `first`.
  [[nodiscard]] std::size_t run_end(std::size_t kind, std::size_t first);
  /// The longest aligned prefix for which the prefix kinds have all blocks.
  [[nodiscard]] std::uint64_t prefix_limit(std::uint64_t local_tokens);
  /// `tokens` if the kind satisfies its rule there, else the longest shorter prefix that the
  /// missing block does not rule out.
  [[nodiscard]] std::uint64_t lower(std::size_t kind, std::uint64_t tokens);
  [[nodiscard]] std::uint64_t aligned(std::uint64_t tokens) const {
    return tokens / kinds_.alignment_tokens * kinds_.alignment_tokens;
  }

  const BlockKinds& kinds_;
  BlockPresence& presence_;
  std::uint64_t tokens_;  ///< The prompt's length, aligned.
  std::vector<Known> known_;
  std::optional<Shortened> shortened_;
};

}  // namespace pegaflow::engine
