#include "engine/eviction_ghosts.h"

#include <algorithm>
#include <utility>

namespace pegaflow {

Result<EvictedBlocks> EvictedBlocks::create(std::uint64_t entries) {
  const std::uint64_t buckets = std::max<std::uint64_t>(1, (entries + kWays - 1) / kWays);
  PEGA_TRY_LET(auto pages, ZeroPages<Bucket>::create(buckets, PageUse::kDense));
  unsigned shift = 0;
  while (((buckets * kWays) >> shift) > 256) ++shift;
  return EvictedBlocks(std::move(pages), shift);
}

void EvictedBlocks::add(std::uint32_t hash, std::uint32_t uses) noexcept {
  ++added_;
  Entry* oldest = nullptr;
  for (Entry& entry : bucket(hash).entries) {
    if (entry.uses == 0) {
      oldest = &entry;
      break;
    }
    if (oldest == nullptr || age(entry) > age(*oldest)) oldest = &entry;
  }
  oldest->tag = tag(hash);
  oldest->uses = uses & 0xFU;
  oldest->when = now() & 0xFFFU;
}

std::optional<EvictedBlocks::Found> EvictedBlocks::take(std::uint32_t hash) noexcept {
  for (Entry& entry : bucket(hash).entries) {
    if (entry.uses == 0 || entry.tag != tag(hash)) continue;
    const Found found{entry.uses, std::uint64_t{age(entry)} << shift_};
    entry.uses = 0;
    return found;
  }
  return std::nullopt;
}

}  // namespace pegaflow
