#include "engine/kinds/restorable.h"

#include <algorithm>
#include <bit>

namespace pegaflow::engine {
namespace {

constexpr std::size_t kGroup = 64;

}  // namespace

RestorableSearch::RestorableSearch(const BlockKinds& kinds, std::size_t units,
                                   BlockPresence& presence)
    : kinds_(kinds),
      presence_(presence),
      tokens_(aligned(std::uint64_t{units} * kinds.unit_tokens)) {
  known_.reserve(kinds.kinds.size());
  for (const BlockKind& kind : kinds.kinds) {
    const std::size_t blocks = tokens_ / kind.block_tokens;
    const std::size_t groups = (blocks + kGroup - 1) / kGroup;
    known_.push_back({.blocks = blocks,
                      .present = std::vector<std::uint64_t>(groups),
                      .asked = std::vector<bool>(groups)});
  }
}

bool RestorableSearch::is_present(std::size_t kind, std::size_t block) {
  Known& known = known_[kind];
  const std::size_t group = block / kGroup;
  if (!known.asked[group]) {
    known.asked[group] = true;
    const std::size_t first = group * kGroup;
    known.present[group] = presence_.present(kind, first, std::min(kGroup, known.blocks - first));
  }
  return (known.present[group] >> (block % kGroup) & 1) != 0;
}

std::size_t RestorableSearch::run_end(std::size_t kind, std::size_t first) {
  const Known& known = known_[kind];
  std::size_t block = first;
  while (block < known.blocks && is_present(kind, block)) {
    // All that are present in the rest of the group at once; zeros are shifted in from the left.
    block += static_cast<std::size_t>(
        std::countr_one(known.present[block / kGroup] >> (block % kGroup)));
  }
  return block;
}

std::uint64_t RestorableSearch::prefix_limit(std::uint64_t local_tokens) {
  std::uint64_t limit = tokens_;
  for (std::size_t kind = 0; kind < known_.size(); ++kind) {
    const BlockKind& spec = kinds_.kinds[kind];
    if (spec.rule != KindRule::kPrefix) continue;
    const std::size_t local = std::min(local_tokens / spec.block_tokens, known_[kind].blocks);
    limit = std::min(limit, std::uint64_t{run_end(kind, local)} * spec.block_tokens);
  }
  return aligned(limit);
}

std::uint64_t RestorableSearch::lower(std::size_t kind, std::uint64_t tokens) {
  const BlockKind& spec = kinds_.kinds[kind];
  const BlockRange range = BlockKinds::needed(spec, tokens);
  Known& known = known_[kind];
  // The range moves to the left only, so what passed before is on its right.
  const bool overlaps = known.from < range.end() && range.end() <= known.to;
  for (std::size_t block = overlaps ? known.from : range.end(); block-- > range.first;) {
    // Every boundary after the missing block needs it: in (its begin, tokens] the ranges end behind
    // the block, and begin no later than this one.
    if (!is_present(kind, block)) return aligned(std::uint64_t{block} * spec.block_tokens);
  }
  known.from = range.first;
  known.to = range.end();
  return tokens;
}

std::uint64_t RestorableSearch::longest(std::uint64_t local_tokens) {
  const std::uint64_t limit = prefix_limit(local_tokens);
  std::uint64_t tokens = limit;
  const bool has_prefix =
      std::any_of(kinds_.kinds.begin(), kinds_.kinds.end(),
                  [](const BlockKind& kind) { return kind.rule == KindRule::kPrefix; });
  std::optional<Shortened> shortened;
  while (tokens > local_tokens) {
    const std::uint64_t before = tokens;
    for (std::size_t kind = 0; kind < known_.size() && tokens > local_tokens; ++kind) {
      if (kinds_.kinds[kind].rule != KindRule::kPrefix) tokens = lower(kind, tokens);
      if (tokens < limit && !shortened) shortened = Shortened{.kind = kind};
    }
    if (tokens == before) break;
  }
  if (shortened) shortened->tokens = limit - std::max(tokens, local_tokens);
  // Without a prefix kind nothing tells a lost window from the first visit of a prompt.
  shortened_ = has_prefix ? shortened : std::nullopt;
  return tokens > local_tokens ? tokens : 0;
}

std::vector<std::uint64_t> RestorableSearch::all(std::uint64_t local_tokens) {
  const std::uint64_t limit = prefix_limit(local_tokens);
  std::vector<std::uint64_t> found;
  for (std::uint64_t tokens = aligned(local_tokens) + kinds_.alignment_tokens; tokens <= limit;
       tokens += kinds_.alignment_tokens) {
    found.push_back(tokens);
  }
  for (std::size_t kind = 0; kind < known_.size(); ++kind) {
    const BlockKind& spec = kinds_.kinds[kind];
    if (spec.rule == KindRule::kPrefix) continue;
    std::size_t run = 0;   // Length of the run of present blocks that ends at `next`.
    std::size_t next = 0;  // The first block that was not looked at.
    std::erase_if(found, [&](std::uint64_t tokens) {
      const BlockRange range = BlockKinds::needed(spec, tokens);
      if (range.first > next) {  // Nothing between the boundaries is needed.
        next = range.first;
        run = 0;
      }
      for (; next < range.end(); ++next) run = is_present(kind, next) ? run + 1 : 0;
      return run < range.count;
    });
  }
  return found;
}

BlockRange RestorableSearch::wanted(std::size_t kind, std::uint64_t tokens,
                                    std::uint64_t local_tokens) const {
  const BlockKind& spec = kinds_.kinds[kind];
  const BlockRange range = BlockKinds::needed(spec, tokens);
  if (spec.rule != KindRule::kPrefix) return range;
  const std::size_t local = std::min<std::size_t>(local_tokens / spec.block_tokens, range.end());
  return {.first = local, .count = range.end() - local};
}

}  // namespace pegaflow::engine
