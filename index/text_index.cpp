#include "index/text_index.h"

#include <algorithm>

#include "base/assert.h"
#include "index/text_tree.h"

namespace pegaflow::index {
namespace {

constexpr std::size_t kFewestBytes = std::size_t{64} << 10U;

TextTree make_tree(std::size_t bytes) {
  // Only addresses are reserved: where even those are short, less is learned.
  for (bytes = std::max(bytes, kFewestBytes); bytes > kFewestBytes; bytes /= 2) {
    if (auto tree = TextTree::create(bytes)) return std::move(*tree);
  }
  auto tree = TextTree::create(kFewestBytes);
  PEGA_ASSERT(tree, "{}", to_string(tree.error()));
  return std::move(*tree);
}

/// A text to be learned.
struct NewText {
  const TextOutline& outline;
  const Text* whole = nullptr;  ///< nullptr: its bytes are not here.
};

/// Whether the text that ends in the node is the beginning of `text`, which has all its chunks.
bool continues(const TextNode& node, const Text& text) {
  if (node.end_bytes == 0 || text.bytes.size() < node.end_bytes) return false;
  const std::size_t tail = node.end_chunk() * Text::kChunkBytes;
  return hash_tail(text.bytes.substr(tail, node.end_bytes - tail), node.chunks.back()) ==
         node.tail_hash;
}

/// The same as far as it can be told: without the bytes only an equal text is recognized.
bool continues(const TextNode& node, const NewText& text) {
  if (text.whole != nullptr) return continues(node, *text.whole);
  return node.end_bytes != 0 && node.end_bytes == text.outline.bytes &&
         node.tail_hash == text.outline.tail;
}

void lower(std::size_t& measured, std::size_t common) { measured = std::min(measured, common); }

}  // namespace

struct TextIndex::State {
  explicit State(std::size_t bytes) : tree(make_tree(bytes)) {}

  TextTree tree;
  std::uint64_t learned = 0;
  std::uint64_t relearned = 0;
  std::vector<Key> chain{};  ///< Used again in each call.

  /// How many of a text's blocks are those of the chain that it shares `spot` with, as far as
  /// `measured` says, or else by the lengths of the texts.
  struct Estimate {
    std::size_t blocks = 0;
    std::size_t sure = 0;
    std::size_t text_bytes = 0;
  };
  [[nodiscard]] Estimate estimate(const TextTree::Spot& spot, const Text& text) const;
  std::size_t common_blocks(TextNodeId id, std::span<const Key> keys);
  void learn(const NewText& text, std::span<const Key> keys, std::span<const BlockKey> hashes);
  void learn_known(const TextTree::Spot& spot, const NewText& text, std::span<const Key> keys,
                   std::span<const BlockKey> hashes);
  void end_text(TextNodeId id, const TextOutline& text);
  void add_leaf(TextNodeId parent, std::size_t first_block, const TextOutline& text,
                std::span<const Key> keys, std::span<const BlockKey> hashes);
};

TextIndex::TextIndex(const Options& options) : state_(std::make_unique<State>(options.bytes)) {}
TextIndex::~TextIndex() = default;

void TextIndex::look_up(const Text& text, Known& out) {
  out.keys.clear();
  out.hashes.clear();
  out.sure = 0;
  out.text_bytes = 0;
  const TextTree::Spot spot = state_->tree.find(text.chunks);
  if (spot.node == kNoNode) return;
  const State::Estimate estimate = state_->estimate(spot, text);
  state_->tree.copy_keys(spot.node, estimate.blocks, out.keys);
  state_->tree.copy_hashes(spot.node, estimate.blocks, out.hashes);
  out.sure = std::min(estimate.sure, out.keys.size());
  out.text_bytes = estimate.text_bytes;
  state_->tree.touch(spot.node);
}

TextIndex::State::Estimate TextIndex::State::estimate(const TextTree::Spot& spot,
                                                      const Text& text) const {
  const TextNode& node = tree.node(spot.node);
  const std::size_t known_bytes = spot.chunks * Text::kChunkBytes;
  const bool has_all = spot.chunks == node.end_chunk();
  if (has_all && continues(node, text)) {
    const bool is_same = text.bytes.size() == node.end_bytes;
    const bool is_measured = is_same || node.common_by_end != TextNode::kUnmeasured;
    const std::size_t blocks =
        is_same ? node.blocks() : std::min(node.blocks(), node.common_by_end);
    return {blocks, is_measured ? blocks : node.first_block, node.end_bytes};
  }
  if (has_all && node.common_by_chunks != TextNode::kUnmeasured) {
    return {node.common_by_chunks, node.common_by_chunks, known_bytes};
  }
  // Blocks lie evenly in the text of the node, as far as is known.
  const std::size_t begin = node.first_chunk * Text::kChunkBytes;
  const std::size_t end = std::max(node.end_bytes, node.end_chunk() * Text::kChunkBytes);
  const std::size_t likely =
      node.keys.size() * (known_bytes - begin) / std::max<std::size_t>(end - begin, 1);
  return {node.first_block + (likely == 0 ? 0 : likely - 1), node.first_block, known_bytes};
}

void TextIndex::learn(const Text& text, std::span<const Key> keys,
                      std::span<const BlockKey> hashes) {
  state_->learn({outline_of(text), &text}, keys, hashes);
}

void TextIndex::learn(const TextOutline& text, std::span<const Key> keys,
                      std::span<const BlockKey> hashes) {
  state_->learn({text, nullptr}, keys, hashes);
}

void TextIndex::State::learn(const NewText& text, std::span<const Key> keys,
                             std::span<const BlockKey> hashes) {
  const std::vector<std::uint64_t>& chunks = text.outline.chunks;
  if (chunks.empty() || keys.empty() || !tree.fits(chunks.size(), keys.size())) return;
  ++learned;
  hashes = hashes.first(std::min(hashes.size(), keys.size()));
  if (const TextTree::Spot spot = tree.find(chunks); spot.node != kNoNode) {
    tree.touch(spot.node);
  }
  tree.make_room(chunks.size(), keys.size());
  const TextTree::Spot spot = tree.find(chunks);
  if (spot.node == kNoNode) return add_leaf(kNoNode, 0, text.outline, keys, hashes);
  learn_known(spot, text, keys, hashes);
}

void TextIndex::State::learn_known(const TextTree::Spot& spot, const NewText& text,
                                   std::span<const Key> keys, std::span<const BlockKey> hashes) {
  TextNodeId id = spot.node;
  const std::size_t common = common_blocks(id, keys);
  if (common == 0) {
    // The engine computes other hashes now: all that begins like this text is out of date.
    ++relearned;
    while (tree.node(id).parent != kNoNode) id = tree.node(id).parent;
    tree.remove_below(id);
    return add_leaf(kNoNode, 0, text.outline, keys, hashes);
  }
  const bool ends_here = spot.chunks == text.outline.chunks.size();
  const auto rest_of_hashes = hashes.subspan(std::min(common, hashes.size()));
  if (spot.chunks < tree.node(id).end_chunk()) {
    id = tree.split(id, spot.chunks, common);
    tree.node(id).common_by_chunks = std::min(common, tree.node(id).blocks());
  } else if (continues(tree.node(id), text)) {
    const bool is_same = text.outline.bytes == tree.node(id).end_bytes;
    if (!is_same) lower(tree.node(id).common_by_end, common);
  } else {
    lower(tree.node(id).common_by_chunks, common);
  }
  // What was measured further up holds at most as far as this text agrees.
  for (TextNodeId above = tree.node(id).parent; above != kNoNode; above = tree.node(above).parent) {
    TextNode& node = tree.node(above);
    if (node.common_by_chunks != TextNode::kUnmeasured) lower(node.common_by_chunks, common);
  }
  if (!ends_here) return add_leaf(id, common, text.outline, keys.subspan(common), rest_of_hashes);
  // The text ends in this node, which has one such end. The newest text is the one that is most
  // likely to be continued, but children need the blocks that they have in common with the node.
  const TextNode& node = tree.node(id);
  const bool agrees = common == node.blocks();
  const bool replaces = node.is_leaf && common >= node.first_block && common < keys.size();
  if (!agrees && !replaces) return;
  if (common < keys.size()) tree.set_blocks(id, common, keys.subspan(common), rest_of_hashes);
  end_text(id, text.outline);
}

std::size_t TextIndex::State::common_blocks(TextNodeId id, std::span<const Key> keys) {
  tree.copy_keys(id, keys.size(), chain);
  return static_cast<std::size_t>(std::ranges::mismatch(chain, keys).in1 - chain.begin());
}

void TextIndex::State::end_text(TextNodeId id, const TextOutline& text) {
  tree.node(id).end_bytes = text.bytes;
  tree.node(id).tail_hash = text.tail;
}

void TextIndex::State::add_leaf(TextNodeId parent, std::size_t first_block, const TextOutline& text,
                                std::span<const Key> keys, std::span<const BlockKey> hashes) {
  const std::size_t first_chunk = parent == kNoNode ? 0 : tree.node(parent).end_chunk();
  TextNode node;
  node.first_chunk = first_chunk;
  node.chunks.assign(text.chunks.begin() + static_cast<std::ptrdiff_t>(first_chunk),
                     text.chunks.end());
  node.first_block = first_block;
  node.keys.assign(keys.begin(), keys.end());
  node.hashes.assign(hashes.begin(), hashes.end());
  end_text(tree.add(parent, std::move(node)), text);
}

std::vector<std::uint32_t> TextIndex::ends() const { return state_->tree.leaves_by_use(); }

bool TextIndex::copy(std::uint32_t end, Learned& out) const {
  const TextTree& tree = state_->tree;
  if (!tree.is_leaf(end) || tree.node(end).end_bytes == 0) return false;
  const TextNode& node = tree.node(end);
  tree.copy_chunks(end, out.text.chunks);
  out.text.bytes = node.end_bytes;
  out.text.tail = node.tail_hash;
  tree.copy_keys(end, node.blocks(), out.keys);
  tree.copy_hashes(end, node.blocks(), out.hashes);
  return true;
}

TextIndex::Stats TextIndex::stats() const {
  return {.bytes = state_->tree.bytes(),
          .chains = state_->tree.leaves(),
          .chunks = state_->tree.chunks(),
          .blocks = state_->tree.blocks(),
          .learned = state_->learned,
          .evicted = state_->tree.evicted(),
          .relearned = state_->relearned};
}

}  // namespace pegaflow::index
