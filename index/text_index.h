#pragma once
/// \file
/// From a prompt's text to the keys of its blocks, learned from what engines made of earlier
/// prompts: no tokenizer.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/block_key.h"
#include "index/key.h"
#include "index/text.h"

namespace pegaflow::index {

/// Owns the chains of keys that texts became. Two prompts with a common start of their text have a
/// common start of their keys. How long that is, is measured when the second of them is learned,
/// and estimated from the lengths until then. Of what chains have in common one copy is kept: each
/// turn of a conversation adds its own text and keys only.
///
/// It forgets whole ends of chains, the least recently used first, to stay within `bytes`.
/// Thread-bound, no locks.
class TextIndex {
 public:
  struct Options {
    /// Bound of its memory, at least 64 KiB. A quarter is address space that is touched as it
    /// fills.
    std::size_t bytes = std::size_t{1} << 30U;
  };

  /// The known blocks of a text. The caller keeps it for reuse; look_up() overwrites it.
  struct Known {
    std::vector<Key> keys;         ///< The blocks of the text from its start, in order.
    std::vector<BlockKey> hashes;  ///< Their full hashes, as far as they were learned: a prefix.
    std::size_t sure = 0;          ///< So many of the keys were measured; the rest are likely.
    std::size_t text_bytes = 0;    ///< So many bytes of the text are known.
  };

  /// One learned text with its blocks, for another index. The caller keeps it for reuse.
  struct Learned {
    TextOutline text;
    std::vector<Key> keys;
    std::vector<BlockKey> hashes;  ///< As in Known.
  };

  struct Stats {
    std::size_t bytes = 0;        ///< Memory in use.
    std::uint64_t chains = 0;     ///< Ends of chains.
    std::uint64_t chunks = 0;     ///< Pieces of text of 256 bytes.
    std::uint64_t blocks = 0;     ///< Keys, each counted once however many chains share it.
    std::uint64_t learned = 0;    ///< Calls of learn().
    std::uint64_t evicted = 0;    ///< Ends of chains forgotten for want of memory.
    std::uint64_t relearned = 0;  ///< Texts whose keys were all others than before.
  };

  explicit TextIndex(const Options& options);
  ~TextIndex();
  TextIndex(const TextIndex&) = delete;
  TextIndex& operator=(const TextIndex&) = delete;

  /// The blocks of `text` are `keys` from the first on, and possibly further blocks that the engine
  /// computed after the text. `hashes` are their full hashes, or empty when only the low 64 bits
  /// are known. A text that is learned again with other keys forgets the former ones. A text of
  /// less than 256 bytes, and one that does not fit into `bytes`, is not learned.
  void learn(const Text& text, std::span<const Key> keys, std::span<const BlockKey> hashes = {});

  /// The same for a text whose bytes are not here. What it has in common with a text that it
  /// continues is then measured less sharply.
  void learn(const TextOutline& text, std::span<const Key> keys,
             std::span<const BlockKey> hashes = {});

  /// Fills `out` with what is known of `text`, and marks its chain as used. Unknown text gives no
  /// keys.
  void look_up(const Text& text, Known& out);

  /// Names of the ends of all chains now, the least recently used first.
  [[nodiscard]] std::vector<std::uint32_t> ends() const;
  /// Copies the text that ends there. False when that end is gone, or is where texts only part.
  bool copy(std::uint32_t end, Learned& out) const;

  [[nodiscard]] Stats stats() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pegaflow::index
