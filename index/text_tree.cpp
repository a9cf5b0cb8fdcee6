#include "index/text_tree.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"

namespace pegaflow::index {
namespace {

// With this many bytes for each chunk the table takes a quarter of the memory at most.
constexpr std::size_t kBytesPerChunk = 64;
// A text that is learned adds a leaf, and cuts a node.
constexpr std::size_t kNewNodes = 2;

}  // namespace

Result<TextTree> TextTree::create(std::size_t max_bytes) {
  const std::size_t chunks = max_bytes / kBytesPerChunk;
  const std::size_t slots = std::bit_ceil(chunks + chunks / 2);
  PEGA_TRY_LET(ZeroArray<Slot> table, ZeroArray<Slot>::create(slots, Pages::kSmall));
  return TextTree(std::move(table), slots, max_bytes);
}

TextTree::Spot TextTree::find(std::span<const std::uint64_t> chunks) const {
  // A chunk is known only with all before it, so the first unknown one is found by bisection; a
  // text that was learned whole is found at once.
  std::size_t known = 0;
  std::size_t unknown = chunks.size() + 1;
  std::size_t next = chunks.size();
  Spot spot;
  while (known + 1 < unknown) {
    const TextNodeId node = find_chunk(chunks[next - 1], next - 1);
    if (node == kNoNode) {
      unknown = next;
    } else {
      known = next;
      spot = {node, known};
    }
    next = known + (unknown - known) / 2;
  }
  return spot;
}

TextNodeId TextTree::add(TextNodeId parent, TextNode node) {
  const TextNodeId id = take_id(std::move(node));
  const TextNode& added = nodes_[id];
  for (std::size_t i = 0; i < added.chunks.size(); ++i) {
    insert_chunk(added.chunks[i], {id + 1, static_cast<std::uint32_t>(added.first_chunk + i)});
  }
  if (parent != kNoNode) {
    if (nodes_[parent].is_leaf) unlink_leaf(parent);
    adopt(parent, id);
  }
  nodes_[id].used = ++clock_;
  link_leaf(id);
  return id;
}

TextNodeId TextTree::split(TextNodeId id, std::size_t chunk, std::size_t block) {
  const std::size_t chunks = chunk - nodes_[id].first_chunk;
  count(nodes_[id], false);
  TextNode upper;
  {
    TextNode& lower = nodes_[id];
    const std::size_t blocks = std::max(block, lower.first_block) - lower.first_block;
    const std::size_t hashes = std::min(blocks, lower.hashes.size());
    const auto move_front = [](auto& from, std::size_t count) {
      const auto end = from.begin() + static_cast<std::ptrdiff_t>(count);
      std::remove_reference_t<decltype(from)> front(from.begin(), end);
      from = std::remove_reference_t<decltype(from)>(end, from.end());
      return front;
    };
    upper.first_chunk = lower.first_chunk;
    upper.first_block = lower.first_block;
    upper.chunks = move_front(lower.chunks, chunks);
    upper.keys = move_front(lower.keys, blocks);
    upper.hashes = move_front(lower.hashes, hashes);
    // Full hashes go on behind the cut only if none is missing before it.
    if (hashes < blocks) lower.hashes.clear();
    lower.first_chunk = chunk;
    lower.first_block = upper.first_block + blocks;
    upper.used = lower.used;
    count(lower, true);
  }
  const TextNodeId above = take_id(std::move(upper));
  for (std::size_t i = 0; i < chunks; ++i) {
    const TextNode& node = nodes_[above];
    // The slot names the lower node, which no longer has the chunk: it is found by the new one.
    std::size_t slot = node.chunks[i] & mask_;
    while (slots_[slot].node != id + 1 || slots_[slot].chunk != node.first_chunk + i) {
      slot = (slot + 1) & mask_;
    }
    slots_[slot].node = above + 1;
  }
  const TextNodeId parent = nodes_[id].parent;
  if (parent != kNoNode) {
    orphan(id);
    adopt(parent, above);
  }
  adopt(above, id);
  return above;
}

void TextTree::remove_below(TextNodeId id) {
  // The leaf below is found again each time: chains are a few nodes deep.
  while (true) {
    TextNodeId leaf = id;
    while (nodes_[leaf].first_child != kNoNode) leaf = nodes_[leaf].first_child;
    remove_leaf(leaf);
    if (leaf == id) return;
  }
}

void TextTree::touch(TextNodeId id) {
  nodes_[id].used = ++clock_;
  if (!nodes_[id].is_leaf || most_used_ == id) return;
  unlink_leaf(id);
  link_leaf(id);
}

void TextTree::set_blocks(TextNodeId id, std::size_t block, std::span<const Key> keys,
                          std::span<const BlockKey> hashes) {
  TextNode& node = nodes_[id];
  count(node, false);
  const std::size_t kept = block - node.first_block;
  node.keys.resize(kept);
  node.keys.insert(node.keys.end(), keys.begin(), keys.end());
  node.hashes.resize(std::min(kept, node.hashes.size()));
  // They are a prefix: those behind an unknown one are of no use.
  if (node.hashes.size() == kept) {
    node.hashes.insert(node.hashes.end(), hashes.begin(), hashes.end());
  }
  count(node, true);
}

void TextTree::count(const TextNode& node, bool is_added) {
  const auto add = [is_added](auto& total, std::size_t more) {
    total = is_added ? total + more : total - more;
  };
  add(bytes_, bytes_of(node));
  add(chunks_, node.chunks.size());
  add(blocks_, node.keys.size());
}

std::size_t TextTree::bytes_of(const TextNode& node) {
  return sizeof(TextNode) + node.chunks.capacity() * sizeof(std::uint64_t) +
         node.keys.capacity() * sizeof(Key) + node.hashes.capacity() * sizeof(BlockKey);
}

void TextTree::make_room(std::size_t chunks, std::size_t blocks) {
  const std::size_t max_chunks = max_bytes_ / kBytesPerChunk;
  const std::size_t more = bytes_for(chunks, blocks);
  while (least_used_ != kNoNode && (bytes() + more > max_bytes_ || chunks_ + chunks > max_chunks)) {
    remove_leaf(least_used_);
    ++evicted_;
  }
}

void TextTree::copy_keys(TextNodeId id, std::size_t count, std::vector<Key>& keys) const {
  count = std::min(count, nodes_[id].blocks());
  keys.resize(count);
  for (TextNodeId at = id; at != kNoNode && count > 0; at = nodes_[at].parent) {
    const TextNode& node = nodes_[at];
    if (count > node.first_block) {
      std::copy_n(node.keys.begin(), count - node.first_block,
                  keys.begin() + static_cast<std::ptrdiff_t>(node.first_block));
      count = node.first_block;
    }
  }
}

void TextTree::copy_chunks(TextNodeId id, std::vector<std::uint64_t>& chunks) const {
  chunks.resize(nodes_[id].end_chunk());
  for (TextNodeId at = id; at != kNoNode; at = nodes_[at].parent) {
    std::copy(nodes_[at].chunks.begin(), nodes_[at].chunks.end(),
              chunks.begin() + static_cast<std::ptrdiff_t>(nodes_[at].first_chunk));
  }
}

std::vector<TextNodeId> TextTree::leaves_by_use() const {
  std::vector<TextNodeId> ids;
  ids.reserve(leaves_);
  for (TextNodeId at = least_used_; at != kNoNode; at = nodes_[at].more_used) ids.push_back(at);
  return ids;
}

void TextTree::copy_hashes(TextNodeId id, std::size_t count, std::vector<BlockKey>& hashes) const {
  count = std::min(count, nodes_[id].blocks());
  hashes.resize(count);
  std::size_t known = count;
  for (TextNodeId at = id; at != kNoNode && count > 0; at = nodes_[at].parent) {
    const TextNode& node = nodes_[at];
    if (count > node.first_block) {
      const std::size_t wanted = count - node.first_block;
      const std::size_t found = std::min(wanted, node.hashes.size());
      std::copy_n(node.hashes.begin(), found,
                  hashes.begin() + static_cast<std::ptrdiff_t>(node.first_block));
      if (found < wanted) known = node.first_block + found;
      count = node.first_block;
    }
  }
  hashes.resize(known);
}

bool TextTree::fits(std::size_t chunks, std::size_t blocks) const {
  return slots_.bytes() + bytes_for(chunks, blocks) <= max_bytes_ &&
         chunks <= max_bytes_ / kBytesPerChunk;
}

std::size_t TextTree::bytes_for(std::size_t chunks, std::size_t blocks) {
  return kNewNodes * sizeof(TextNode) + chunks * sizeof(std::uint64_t) +
         blocks * (sizeof(Key) + sizeof(BlockKey));
}

TextNodeId TextTree::find_chunk(std::uint64_t hash, std::size_t chunk) const {
  for (std::size_t slot = hash & mask_; slots_[slot].node != 0; slot = (slot + 1) & mask_) {
    if (slots_[slot].chunk == chunk && hash_of(slots_[slot]) == hash) return slots_[slot].node - 1;
  }
  return kNoNode;
}

void TextTree::insert_chunk(std::uint64_t hash, Slot slot) {
  std::size_t at = hash & mask_;
  while (slots_[at].node != 0) at = (at + 1) & mask_;
  slots_[at] = slot;
}

void TextTree::erase_chunk(std::uint64_t hash, std::size_t chunk) {
  std::size_t hole = hash & mask_;
  while (slots_[hole].chunk != chunk || hash_of(slots_[hole]) != hash) hole = (hole + 1) & mask_;
  // Chunks that were pushed past the hole move back, so that a search may end at an empty slot.
  for (std::size_t at = (hole + 1) & mask_; slots_[at].node != 0; at = (at + 1) & mask_) {
    const std::size_t wanted = hash_of(slots_[at]) & mask_;
    if (((at - wanted) & mask_) < ((at - hole) & mask_)) continue;
    slots_[hole] = slots_[at];
    hole = at;
  }
  slots_[hole] = {};
}

TextNodeId TextTree::take_id(TextNode node) {
  count(node, true);
  if (free_.empty()) {
    nodes_.push_back(std::move(node));
    return static_cast<TextNodeId>(nodes_.size() - 1);
  }
  const TextNodeId id = free_.back();
  free_.pop_back();
  nodes_[id] = std::move(node);
  return id;
}

void TextTree::remove_leaf(TextNodeId id) {
  TextNode& node = nodes_[id];
  for (std::size_t i = 0; i < node.chunks.size(); ++i) {
    erase_chunk(node.chunks[i], node.first_chunk + i);
  }
  count(node, false);
  if (node.is_leaf) unlink_leaf(id);
  const TextNodeId parent = node.parent;
  if (parent != kNoNode) {
    orphan(id);
    if (nodes_[parent].first_child == kNoNode) link_leaf(parent);
  }
  nodes_[id] = {};
  free_.push_back(id);
}

void TextTree::adopt(TextNodeId parent, TextNodeId child) {
  const TextNodeId former = nodes_[parent].first_child;
  nodes_[child].parent = parent;
  nodes_[child].older = former;
  nodes_[child].newer = kNoNode;
  if (former != kNoNode) nodes_[former].newer = child;
  nodes_[parent].first_child = child;
}

void TextTree::orphan(TextNodeId child) {
  const TextNode& node = nodes_[child];
  if (node.newer != kNoNode) {
    nodes_[node.newer].older = node.older;
  } else {
    nodes_[node.parent].first_child = node.older;
  }
  if (node.older != kNoNode) nodes_[node.older].newer = node.newer;
  nodes_[child].parent = kNoNode;
}

void TextTree::link_leaf(TextNodeId id) {
  TextNode& node = nodes_[id];
  node.is_leaf = true;
  ++leaves_;
  // A node that becomes a leaf because its last child went was used at least as lately as that.
  const bool is_least = least_used_ == kNoNode || node.used < nodes_[least_used_].used;
  node.more_used = is_least ? least_used_ : kNoNode;
  node.less_used = is_least ? kNoNode : most_used_;
  if (node.more_used != kNoNode) nodes_[node.more_used].less_used = id;
  if (node.less_used != kNoNode) nodes_[node.less_used].more_used = id;
  if (is_least) least_used_ = id;
  if (!is_least || most_used_ == kNoNode) most_used_ = id;
}

void TextTree::unlink_leaf(TextNodeId id) {
  TextNode& node = nodes_[id];
  (node.more_used == kNoNode ? most_used_ : nodes_[node.more_used].less_used) = node.less_used;
  (node.less_used == kNoNode ? least_used_ : nodes_[node.less_used].more_used) = node.more_used;
  node.more_used = kNoNode;
  node.less_used = kNoNode;
  node.is_leaf = false;
  --leaves_;
}

}  // namespace pegaflow::index
