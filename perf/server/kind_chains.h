#pragma once
/// \file
/// Prompts of an engine with several kinds of blocks, at a server.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "harness/wire_client.h"
#include "perf/lib/keys.h"

namespace pegaflow::perf {

/// Prompts of 8,192 units of 16 tokens with full attention, a window of 1,024 tokens, chunks of
/// 8,192 and states of 512. Each can be restored as a whole. Immutable.
class KindChains {
 public:
  static constexpr std::size_t kUnits = 8192;
  static constexpr std::uint64_t kPrompts = 8;
  /// Blocks of all prompts, of kSmallPageBytes each.
  static const std::uint64_t kBlocks;

  /// Registers an instance with these kinds over `client` and seals the blocks of all prompts,
  /// without writing their pages. Errors: the server's; kOutOfCapacity when a block got no slot.
  static Result<KindChains> fill(harness::WireClient& client, std::uint64_t seed);

  /// The keys of a prompt; `draw` numbers the draw.
  [[nodiscard]] std::vector<BlockKey> prompt(std::uint64_t draw) const {
    return keys_.range(draw % kPrompts * kUnits, kUnits);
  }

 private:
  explicit KindChains(std::uint64_t seed) : keys_(~seed) {}
  KeySource keys_;
};

}  // namespace pegaflow::perf
