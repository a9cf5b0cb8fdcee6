#pragma once
/// \file
/// The texts that were learned, as a tree: what several of them begin with is stored once.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <span>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "index/key.h"
#include "index/memory/zero_array.h"

namespace pegaflow::index {

using TextNodeId = std::uint32_t;
inline constexpr TextNodeId kNoNode = std::numeric_limits<TextNodeId>::max();

/// A piece of text between two places where texts part, with the blocks that it adds.
struct TextNode {
  static constexpr std::size_t kUnmeasured = std::numeric_limits<std::size_t>::max();

  std::size_t first_chunk = 0;
  std::vector<std::uint64_t> chunks{};  ///< Hashes of its chunks.
  /// So many blocks are those of the parent's chain; that may have more.
  std::size_t first_block = 0;
  std::vector<Key> keys{};         ///< The blocks from there on.
  std::vector<BlockKey> hashes{};  ///< Their full hashes, or a prefix of them.

  /// Bytes of the text that ends in this node, and the hash of those behind its last chunk; 0 if
  /// texts only part here.
  std::size_t end_bytes = 0;
  std::uint64_t tail_hash = 0;
  /// The fewest blocks that a text with all chunks of this node had in common with its chain.
  std::size_t common_by_chunks = kUnmeasured;
  /// The same of texts that continue the one that ends here.
  std::size_t common_by_end = kUnmeasured;

  TextNodeId parent = kNoNode;
  TextNodeId first_child = kNoNode;
  TextNodeId older = kNoNode;  ///< Siblings.
  TextNodeId newer = kNoNode;
  TextNodeId more_used = kNoNode;  ///< Leaves by their last use.
  TextNodeId less_used = kNoNode;
  std::uint64_t used = 0;
  bool is_leaf = false;

  [[nodiscard]] std::size_t end_chunk() const { return first_chunk + chunks.size(); }
  [[nodiscard]] std::size_t blocks() const { return first_block + keys.size(); }
};

/// Owns the nodes, finds them by chunk, and forgets the leaf that was not used for longest when it
/// has more than `max_bytes`. A chunk is in the tree only with all before it. Thread-bound.
class TextTree {
 public:
  /// Errors: kOutOfCapacity.
  static Result<TextTree> create(std::size_t max_bytes);

  /// The end of what the tree knows of a text.
  struct Spot {
    TextNodeId node = kNoNode;
    std::size_t chunks = 0;  ///< From the start of the text.
  };
  [[nodiscard]] Spot find(std::span<const std::uint64_t> chunks) const;

  [[nodiscard]] TextNode& node(TextNodeId id) { return nodes_[id]; }
  [[nodiscard]] const TextNode& node(TextNodeId id) const { return nodes_[id]; }

  /// Adds a leaf below `parent`, or a root for kNoNode.
  TextNodeId add(TextNodeId parent, TextNode node);
  /// Cuts the node before its chunk `chunk`, which is within it and not its first, and after its
  /// block `block`. The returned node has the upper part; `id` keeps the rest, and its children.
  TextNodeId split(TextNodeId id, std::size_t chunk, std::size_t block);
  /// Forgets the node and all below it.
  void remove_below(TextNodeId id);
  /// The node was used now.
  void touch(TextNodeId id);
  /// From `block` on, which is within the node or at its end, its blocks are these. No child may
  /// have more of its former blocks.
  void set_blocks(TextNodeId id, std::size_t block, std::span<const Key> keys,
                  std::span<const BlockKey> hashes);

  /// Forgets leaves, the least used first, until a text with so many chunks and blocks fits.
  void make_room(std::size_t chunks, std::size_t blocks);

  /// The first `count` blocks of the node's chain, at most all of them.
  void copy_keys(TextNodeId id, std::size_t count, std::vector<Key>& keys) const;
  /// Their full hashes, up to the first that is unknown.
  void copy_hashes(TextNodeId id, std::size_t count, std::vector<BlockKey>& hashes) const;

  /// The chunks of the node's chain.
  void copy_chunks(TextNodeId id, std::vector<std::uint64_t>& chunks) const;
  /// All leaves, the least recently used first.
  [[nodiscard]] std::vector<TextNodeId> leaves_by_use() const;
  /// Whether the id is that of a leaf now.
  [[nodiscard]] bool is_leaf(TextNodeId id) const {
    return id < nodes_.size() && nodes_[id].is_leaf;
  }

  /// Whether a text with so many chunks and blocks fits into an empty tree.
  [[nodiscard]] bool fits(std::size_t chunks, std::size_t blocks) const;

  [[nodiscard]] std::size_t bytes() const { return bytes_ + slots_.bytes(); }
  [[nodiscard]] std::uint64_t leaves() const { return leaves_; }
  [[nodiscard]] std::uint64_t chunks() const { return chunks_; }
  [[nodiscard]] std::uint64_t blocks() const { return blocks_; }
  [[nodiscard]] std::uint64_t evicted() const { return evicted_; }

 private:
  /// A chunk, by its node and its position in the text. `node` is one more than the id; 0 is empty.
  struct Slot {
    std::uint32_t node;
    std::uint32_t chunk;
  };

  TextTree(ZeroArray<Slot> slots, std::size_t slot_count, std::size_t max_bytes)
      : slots_(std::move(slots)), mask_(slot_count - 1), max_bytes_(max_bytes) {}

  [[nodiscard]] static std::size_t bytes_of(const TextNode& node);
  void count(const TextNode& node, bool is_added);
  [[nodiscard]] static std::size_t bytes_for(std::size_t chunks, std::size_t blocks);
  [[nodiscard]] TextNodeId find_chunk(std::uint64_t hash, std::size_t chunk) const;
  [[nodiscard]] std::uint64_t hash_of(const Slot& slot) const {
    const TextNode& node = nodes_[slot.node - 1];
    return node.chunks[slot.chunk - node.first_chunk];
  }
  void insert_chunk(std::uint64_t hash, Slot slot);
  void erase_chunk(std::uint64_t hash, std::size_t chunk);
  TextNodeId take_id(TextNode node);
  void remove_leaf(TextNodeId id);
  void adopt(TextNodeId parent, TextNodeId child);
  void orphan(TextNodeId child);
  void link_leaf(TextNodeId id);
  void unlink_leaf(TextNodeId id);

  ZeroArray<Slot> slots_;  ///< Hash table with linear probing, at most two thirds full.
  std::size_t mask_;
  std::size_t max_bytes_;
  std::deque<TextNode> nodes_;
  std::vector<TextNodeId> free_;
  TextNodeId most_used_ = kNoNode;
  TextNodeId least_used_ = kNoNode;
  std::size_t bytes_ = 0;
  std::uint64_t clock_ = 0;
  std::uint64_t leaves_ = 0;
  std::uint64_t chunks_ = 0;
  std::uint64_t blocks_ = 0;
  std::uint64_t evicted_ = 0;
};

}  // namespace pegaflow::index
