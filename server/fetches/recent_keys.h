#pragma once
/// \file
/// The blocks that were requested lately, for a policy that may err.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>

#include "base/block_key.h"
#include "engine/tables/key_hash.h"
#include "engine/types/ids.h"

namespace pegaflow::server {

/// The kMost blocks that were noted last, by hashes of 64 bits: two blocks may count as one. Has no
/// clock. Thread-bound.
class RecentKeys {
 public:
  /// 8 MiB of memory. Blocks of 16 tokens: the prompts of the last million tokens.
  static constexpr std::size_t kMost = std::size_t{1} << 16;

  void note(engine::SpaceId space, std::span<const BlockKey> keys) {
    for (const BlockKey& key : keys) {
      const std::uint64_t hash = engine::key_hash(space, key);
      known_[hash] = ++last_;
      order_.push_back({hash, last_});
    }
    while (known_.size() > kMost || order_.size() > 2 * kMost) {
      const auto found = known_.find(order_.front().hash);
      if (found != known_.end() && found->second == order_.front().number) known_.erase(found);
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
  struct Noted {
    std::uint64_t hash = 0;
    std::uint64_t number = 0;
  };
  std::unordered_map<std::uint64_t, std::uint64_t> known_;  ///< The number of the last note.
  std::deque<Noted> order_;                                 ///< All notes of known keys, and older.
  std::uint64_t last_ = 0;
};

}  // namespace pegaflow::server
