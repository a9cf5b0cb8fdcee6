#pragma once
/// \file
/// The blocks that were asked for lately, for a policy that may err.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <unordered_set>

#include "base/block_key.h"
#include "engine/tables/key_hash.h"
#include "engine/types/ids.h"

namespace pegaflow::server {

/// The last kMost blocks that were noted, by hashes of 64 bits: two blocks may count as one. Has no
/// clock. Thread-bound.
class RecentKeys {
 public:
  /// 4 MiB of memory. Blocks of 16 tokens: the prompts of the last million tokens.
  static constexpr std::size_t kMost = std::size_t{1} << 16;

  void note(engine::SpaceId space, std::span<const BlockKey> keys) {
    for (const BlockKey& key : keys) {
      const std::uint64_t hash = engine::key_hash(space, key);
      if (!known_.insert(hash).second) continue;
      order_.push_back(hash);
      if (order_.size() <= kMost) continue;
      known_.erase(order_.front());
      order_.pop_front();
    }
  }
  /// How many of the leading keys are known, if `are_known`, or are not.
  [[nodiscard]] std::size_t leading(engine::SpaceId space, std::span<const BlockKey> keys,
                                    bool are_known) const {
    std::size_t count = 0;
    while (count < keys.size() &&
           known_.contains(engine::key_hash(space, keys[count])) == are_known) {
      ++count;
    }
    return count;
  }

 private:
  std::unordered_set<std::uint64_t> known_;
  std::deque<std::uint64_t> order_;  ///< Those of `known_`, the oldest first.
};

}  // namespace pegaflow::server
