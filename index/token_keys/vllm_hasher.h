#pragma once
/// \file
/// The block hashes of vLLM, from token ids.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "index/token_keys/prompt.h"

namespace pegaflow::index {

/// vLLM's option --prefix-caching-hash-algo.
enum class VllmAlgorithm : std::uint8_t { kSha256, kSha256Cbor, kXxhash, kXxhashCbor };

/// The form in which vLLM writes what is hashed beside the tokens.
enum class VllmExtras : std::uint8_t {
  kBareIdentifiers,  ///< Strings only: images by their identifier alone, as first releases did.
  kUntagged,         ///< Up to 0.30: images by identifier and offset; adapters by name.
  kTagged,           ///< From 0.31 on: each with its kind; adapters by name and path.
};

/// Errors: kInvalidArgument for another name than vLLM's four.
Result<VllmAlgorithm> vllm_algorithm(std::string_view name);

/// Computes the hashes that vLLM's engines compute, byte for byte, except for prompts given as
/// embeddings. Immutable after create().
class VllmHasher {
 public:
  struct Options {
    VllmAlgorithm algorithm = VllmAlgorithm::kSha256;
    VllmExtras extras = VllmExtras::kTagged;
    std::string seed = "vllm-none-hash";  ///< PYTHONHASHSEED of the engine, where it is set.
    std::uint32_t block_size = 16;        ///< Tokens, 1 to 8,192.
  };

  /// Errors: kInvalidArgument for a block size out of its range, or a seed of more than 255 bytes.
  static Result<VllmHasher> create(const Options& options);

  /// Replaces `out` by the hashes of the prompt's full blocks: 32 bytes with SHA-256, else 16.
  /// Errors: kInvalidArgument when items overlap or are out of order, or when a salt, a name or an
  /// identifier has more than 1,024 bytes, or more than 64 items lie in one block.
  Result<void> hash(const TokenPrompt& prompt, std::vector<BlockKey>& out) const;

  /// Bytes of each hash: 32 or 16.
  [[nodiscard]] std::size_t hash_bytes() const;

  /// The low 64 bits of a hash of this hasher, as vLLM's events have them by default.
  [[nodiscard]] std::uint64_t low64(const BlockKey& hash) const;

 private:
  explicit VllmHasher(const Options& options) : options_(options) {}
  [[nodiscard]] bool is_cbor() const;
  Options options_;
  BlockKey root_;  ///< Parent of the first block.
};

}  // namespace pegaflow::index
