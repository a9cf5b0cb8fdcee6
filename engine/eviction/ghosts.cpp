#include "engine/eviction/ghosts.h"

#include <algorithm>
#include <utility>

namespace pegaflow::engine {

Result<EvictedBlocks> EvictedBlocks::create(std::uint64_t entries) {
  const std::uint64_t buckets = std::max<std::uint64_t>(1, (entries + kWays - 1) / kWays);
  PEGA_TRY_LET(auto pages, ZeroPages<Bucket>::create(buckets, PageUse::kDense));
  unsigned shift = 0;
  while (((buckets * kWays) >> shift) > 256) ++shift;
  return EvictedBlocks(std::move(pages), shift);
}

// Both functions look at all entries without a branch, so that the compiler processes several at a
// time: the bucket is in the cache, and no branch predictor can predict the matching entry.

void EvictedBlocks::add(std::uint32_t hash, std::uint32_t uses) noexcept {
  ++added_;
  Bucket& in = bucket(hash);
  const std::int32_t time = now();
  // The first free entry, else the first of the oldest: its number is in the low bits.
  std::int32_t best = 0;
  for (std::int32_t i = 0; i < kWays; ++i) {
    const Entry entry = in.entries[i];
    const std::int32_t worth = uses_of(entry) == 0 ? kTimes : age(entry, time);
    best = std::max(best, worth * kWays + (kWays - 1 - i));
  }
  in.entries[kWays - 1 - best % kWays] = make_entry(tag(hash), uses, time);
}

std::optional<EvictedBlocks::Found> EvictedBlocks::take(std::uint32_t hash) noexcept {
  Bucket& in = bucket(hash);
  const std::int32_t wanted = tag(hash);
  std::int32_t first = 0;
  for (std::int32_t i = 0; i < kWays; ++i) {
    const Entry entry = in.entries[i];
    const bool is_it = uses_of(entry) != 0 && tag_of(entry) == wanted;
    first = std::max(first, is_it ? kWays - i : 0);
  }
  if (first == 0) return std::nullopt;
  Entry& entry = in.entries[kWays - first];
  const Found found{static_cast<std::uint32_t>(uses_of(entry)),
                    static_cast<std::uint64_t>(age(entry, now())) << shift_};
  entry = 0;
  return found;
}

}  // namespace pegaflow::engine
