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

/// How vLLM writes what is hashed beside the tokens: bare up to 0.30, with a tag from 0.31 on.
enum class VllmExtras : std::uint8_t { kUntagged, kTagged };

/// Errors: kInvalidArgument for another name than vLLM's four.
Result<VllmAlgorithm> vllm_algorithm(std::string_view name);

/// Computes the hashes that vLLM's engines compute, byte for byte. Immutable after create().
class VllmHasher {
 public:
  struct Options {
    VllmAlgorithm algorithm = VllmAlgorithm::kSha256;
    VllmExtras extras = VllmExtras::kTagged;
    std::string seed = "vllm-none-hash";  ///< PYTHONHASHSEED, where it is set.
    std::uint32_t block_size = 16;        ///< Tokens, 1 to 8,192.
  };

  /// Errors: kInvalidArgument for a block size out of its range.
  static Result<VllmHasher> create(const Options& options);

  /// Replaces `out` by the hashes of the prompt's full blocks: 32 bytes with SHA-256, else 16.
  /// Errors: kInvalidArgument when items overlap, are out of order or reach beyond the tokens.
  Result<void> hash(const TokenPrompt& prompt, std::vector<BlockKey>& out) const;

  /// Bytes of each hash: 32 or 16.
  [[nodiscard]] std::size_t hash_bytes() const;

  /// The low 64 bits of a hash of this hasher, as vLLM's events have them by default.
  [[nodiscard]] std::uint64_t low64(const BlockKey& hash) const;

 private:
  explicit VllmHasher(const Options& options);
  Options options_;
  BlockKey root_;  ///< Parent of the first block.
};

}  // namespace pegaflow::index
