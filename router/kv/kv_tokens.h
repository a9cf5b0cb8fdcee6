#pragma once
/// \file
/// From token ids to the keys of blocks: how each engine hashes, found by its own events.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "index/events/kv_event.h"
#include "index/key.h"
#include "index/token_keys/vllm_hasher.h"

namespace pegaflow::router {

/// A way to hash that an engine was seen to use: a number of KvTokens; 0 is none.
using HashMode = std::uint32_t;

/// Finds out by which of vLLM's algorithms and seeds an engine hashes, and computes keys in the
/// same way. A mode is used only after it has reproduced a hash that the engine announced, and no
/// longer once the engine announces another one: keys are right, or prompts are learned as text.
///
/// At most kMaxModes modes are kept; engines with further ones are learned as text. Thread-bound.
class KvTokens {
 public:
  /// Tokens of a chain's first block that events have to bring; larger blocks are not recognized.
  static constexpr std::uint32_t kHeadTokens = 2048;
  static constexpr std::size_t kMaxModes = 64;
  static constexpr std::size_t kMaxSeeds = 16;
  /// Events that no mode explains, after which an engine is not tried again until it restarts.
  static constexpr std::uint32_t kMaxTries = 64;

  /// The modes of one rank, as far as they are known. A value of its owner; a new one knows
  /// nothing.
  struct Engine {
    HashMode mode = 0;               ///< For prompts of tokens alone.
    HashMode salted = 0;             ///< For prompts with a cache_salt.
    std::uint32_t tries = 0;         ///< Events that no mode has explained.
    std::uint64_t contradicted = 0;  ///< Times that an event disproved the mode.
  };

  struct Stats {
    std::uint64_t hashed = 0;   ///< Prompts of token ids whose keys were computed.
    std::uint64_t learned = 0;  ///< Prompts of token ids that are treated as text.
  };

  /// `seeds` are values of PYTHONHASHSEED beside vLLM's default and "0".
  /// Errors: kInvalidArgument for more than kMaxSeeds, or one of more than 255 bytes.
  static Result<KvTokens> create(std::span<const std::string> seeds);

  /// An event of the engine: finds, confirms or disproves its modes.
  void observe(Engine& engine, const index::KvEvent& event);

  /// Replaces `keys` by those of the full blocks of the tokens; `salt` is empty without one. False
  /// if the engine's mode for such prompts is not known; `mode` is then 0.
  bool keys(const Engine& engine, std::span<const std::uint32_t> tokens, std::string_view salt,
            std::vector<index::Key>& keys, HashMode& mode);

  /// "sha256_cbor", or "sha256_cbor, seed 0"; "not known".
  [[nodiscard]] std::string name_of(HashMode mode) const;
  /// Tokens of a block; 0 for mode 0.
  [[nodiscard]] std::uint32_t block_tokens(HashMode mode) const;

  Stats stats{};

 private:
  struct Mode {
    index::VllmHasher::Options options;
    index::VllmHasher hasher;
  };

  explicit KvTokens(std::vector<std::string> seeds) : seeds_(std::move(seeds)) {}
  /// Whether the mode gives the event's first hash.
  bool explains(const index::VllmHasher& hasher, const index::KvEvent& event,
                std::string_view salt);
  void find_mode(Engine& engine, const index::KvEvent& event);
  void find_salted(Engine& engine, const index::KvEvent& event);
  /// The number of a mode with these options; 0 at the limit.
  HashMode number_of(const index::VllmHasher::Options& options, const index::VllmHasher& hasher);

  std::vector<std::string> seeds_;
  std::vector<Mode> modes_;       // Mode m is at m - 1.
  std::vector<BlockKey> hashes_;  // Kept between calls.
};

}  // namespace pegaflow::router
