#include "perf/placement/lru_blocks.h"

namespace pegaflow::perf {

LruBlocks::LruBlocks(std::size_t capacity) : blocks_(1), capacity_(capacity) {
  places_.reserve(capacity);
}

std::size_t LruBlocks::prefix(std::span<const index::Key> chain) const {
  std::size_t found = 0;
  while (found < chain.size() && places_.contains(chain[found])) ++found;
  return found;
}

std::size_t LruBlocks::complete_prefix(std::span<const index::Key> chain, double now) const {
  std::size_t found = 0;
  for (; found < chain.size(); ++found) {
    const auto place = places_.find(chain[found]);
    if (place == places_.end() || blocks_[place->second].complete_at > now) break;
  }
  return found;
}

void LruBlocks::unlink(std::uint32_t at) {
  blocks_[blocks_[at].older].newer = blocks_[at].newer;
  blocks_[blocks_[at].newer].older = blocks_[at].older;
}

void LruBlocks::make_newest(std::uint32_t at) {
  blocks_[at].older = blocks_[0].older;
  blocks_[at].newer = 0;
  blocks_[blocks_[0].older].newer = at;
  blocks_[0].older = at;
}

void LruBlocks::use(std::span<const index::Key> chain, double complete_at,
                    std::vector<index::Key>& evicted) {
  for (std::size_t i = chain.size(); i > 0; --i) {
    const index::Key key = chain[i - 1];
    const auto [place, is_new] = places_.try_emplace(key, 0);
    std::uint32_t at = place->second;
    if (!is_new) {
      unlink(at);
    } else if (places_.size() > capacity_) {
      at = blocks_[0].newer;
      evicted.push_back(blocks_[at].key);
      places_.erase(blocks_[at].key);
      unlink(at);
      places_[key] = at;
      blocks_[at] = {.key = key, .complete_at = complete_at};
    } else {
      at = static_cast<std::uint32_t>(blocks_.size());
      blocks_.push_back({.key = key, .complete_at = complete_at});
      place->second = at;
    }
    make_newest(at);
  }
}

}  // namespace pegaflow::perf
