#include "index/text.h"

#include <xxhash.h>

namespace pegaflow::index {

std::uint64_t hash_root(const TextRoot& root) {
  std::uint64_t hash = 0;
  for (const std::string_view part : {root.model, root.lora, root.salt, root.rendering}) {
    // The hash of a part covers its length, so the chain of four separates them.
    hash = XXH3_64bits_withSeed(part.data(), part.size(), hash);
  }
  return hash;
}

void hash_text(std::uint64_t root, std::string_view bytes, Text& out) {
  out.bytes = bytes;
  out.root = root;
  out.chunks.clear();
  out.chunks.reserve(bytes.size() / Text::kChunkBytes);
  std::uint64_t hash = root;
  while (bytes.size() >= Text::kChunkBytes) {
    hash = XXH3_64bits_withSeed(bytes.data(), Text::kChunkBytes, hash);
    out.chunks.push_back(hash);
    bytes.remove_prefix(Text::kChunkBytes);
  }
}

std::uint64_t hash_tail(std::string_view tail, std::uint64_t chunk) {
  return XXH3_64bits_withSeed(tail.data(), tail.size(), chunk);
}

TextOutline outline_of(const Text& text) {
  if (text.chunks.empty()) return {};
  const std::string_view tail = text.bytes.substr(text.chunks.size() * Text::kChunkBytes);
  return {.chunks = text.chunks,
          .bytes = text.bytes.size(),
          .tail = hash_tail(tail, text.chunks.back())};
}

}  // namespace pegaflow::index
