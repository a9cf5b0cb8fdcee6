#pragma once
/// \file
/// A prompt's text, hashed piece by piece.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace pegaflow::index {

/// The part of a request that decides, beside the text, which tokens and which blocks it becomes.
/// Texts with different roots have nothing in common.
struct TextRoot {
  std::string_view model{};      ///< The name in the request.
  std::string_view lora{};       ///< Name and path of the adapter; empty without one.
  std::string_view salt{};       ///< The cache salt that the engine gets: it stands for the tenant.
  std::string_view rendering{};  ///< Template options, tool choice: raw bytes, in a fixed order.
};

/// The canonical bytes of a prompt (tools, then messages or prompt, as the client wrote them) with
/// the hashes of their beginnings.
struct Text {
  static constexpr std::size_t kChunkBytes = 256;

  std::string_view bytes;             ///< The caller's memory; it outlives the use of the text.
  std::uint64_t root = 0;             ///< Hash of the root.
  std::vector<std::uint64_t> chunks;  ///< [i]: hash of the root and the first 256 (i + 1) bytes.
};

/// The part of a text that another process needs to learn its blocks: no bytes of it.
struct TextOutline {
  std::vector<std::uint64_t> chunks;  ///< Text::chunks.
  std::size_t bytes = 0;              ///< Length of the text; at least 256 for each chunk.
  std::uint64_t tail = 0;  ///< Hash of the bytes behind the last chunk, and of the chunk.
};

/// The hash of a root. Each part is hashed with its length: no two divisions of the same bytes are
/// equal.
[[nodiscard]] std::uint64_t hash_root(const TextRoot& root);

/// Hashes `bytes` under `root` into `out`, whose memory is used again.
void hash_text(std::uint64_t root, std::string_view bytes, Text& out);

/// The hash of the bytes behind the chunk with this hash.
[[nodiscard]] std::uint64_t hash_tail(std::string_view tail, std::uint64_t chunk);

/// The outline of a text of at least one chunk; without chunks for a shorter one.
[[nodiscard]] TextOutline outline_of(const Text& text);

}  // namespace pegaflow::index
