#include "server/fetches/peer_search.h"

#include <algorithm>
#include <utility>

#include <kj/vector.h>

namespace pegaflow::server {
namespace {

/// Blocks of one answer of the store; that of engine::RestorableSearch.
constexpr std::size_t kGroup = 64;

}  // namespace

/// The blocks of this node and of one owner, or of this node alone.
class PeerSearch::Union final : public engine::BlockPresence {
 public:
  Union(const PeerSearch& search, const Owner* owner) : search_(search), owner_(owner) {}

  std::uint64_t present(std::size_t kind, std::size_t first, std::size_t count) override {
    std::uint64_t bits = search_.here(kind, first / kGroup);
    for (std::size_t i = 0; i < count && owner_ != nullptr; ++i) {
      bits |= std::uint64_t{search_.is_at(owner_, kind, first + i)} << i;
    }
    return bits;
  }

 private:
  const PeerSearch& search_;
  const Owner* owner_;
};

PeerSearch::PeerSearch(const engine::BlockStore& store, cluster::Source& source,
                       CacheService::WantsOfKinds wants, std::span<const BlockKey> units)
    : store_(store),
      source_(source),
      wants_(std::move(wants)),
      units_(units.begin(), units.end()),
      keys_(wants_.rules, units_),
      here_(wants_.kinds.size()) {
  for (std::size_t kind = 0; kind < here_.size(); ++kind) {
    const std::size_t groups = (blocks_of(kind) + kGroup - 1) / kGroup;
    here_[kind] = {.groups = std::vector<std::uint64_t>(groups),
                   .looked_at = std::vector<bool>(groups)};
  }
  local_ = longest(nullptr);
}

std::size_t PeerSearch::blocks_of(std::size_t kind) const {
  return aligned(std::uint64_t{units_.size()} * wants_.rules.unit_tokens) /
         wants_.rules.kinds[kind].block_tokens;
}

std::uint64_t PeerSearch::aligned(std::uint64_t tokens) const {
  return tokens / wants_.rules.alignment_tokens * wants_.rules.alignment_tokens;
}

std::uint64_t PeerSearch::here(std::size_t kind, std::size_t group) const {
  Here& known = here_[kind];
  if (!known.looked_at[group]) {
    known.looked_at[group] = true;
    std::vector<BlockKey> scratch;
    const std::size_t first = group * kGroup;
    const std::size_t count = std::min(kGroup, blocks_of(kind) - first);
    known.groups[group] = store_.present_each(
        wants_.kinds[kind].generation, keys_.of(kind, {.first = first, .count = count}, scratch));
  }
  return known.groups[group];
}

bool PeerSearch::is_here(std::size_t kind, std::size_t block) const {
  return (here(kind, block / kGroup) >> (block % kGroup) & 1) != 0;
}

bool PeerSearch::is_at(const Owner* owner, std::size_t kind, std::size_t block) const {
  return owner != nullptr && !owner->has[kind].empty() && owner->has[kind][block];
}

std::uint64_t PeerSearch::prefix_limit(const Owner* owner) const {
  std::uint64_t limit = std::uint64_t{units_.size()} * wants_.rules.unit_tokens;
  for (std::size_t kind = 0; kind < wants_.kinds.size(); ++kind) {
    const engine::BlockKind& rule = wants_.rules.kinds[kind];
    if (rule.rule != engine::KindRule::kPrefix) continue;
    std::size_t block = wants_.local_tokens / rule.block_tokens;
    const std::size_t blocks = blocks_of(kind);
    while (block < blocks && (is_at(owner, kind, block) || is_here(kind, block))) ++block;
    limit = std::min(limit, std::uint64_t{block} * rule.block_tokens);
  }
  return aligned(limit);
}

std::uint64_t PeerSearch::longest(const Owner* owner) const {
  Union blocks(*this, owner);
  return engine::RestorableSearch(wants_.rules, units_.size(), blocks).longest(wants_.local_tokens);
}

bool PeerSearch::may_find_more() const noexcept {
  return aligned(std::uint64_t{units_.size()} * wants_.rules.unit_tokens) >
         std::max(local_, wants_.local_tokens);
}

// ---- requests

kj::Promise<PeerSearch::Found> PeerSearch::run() {
  return ask_prefixes().then([this]() { return ask_others(); }).then([this]() { return choose(); });
}

PeerSearch::Asked PeerSearch::missing_of_prefix(std::size_t kind) const {
  const std::size_t blocks = blocks_of(kind);
  const std::size_t first = wants_.local_tokens / wants_.rules.kinds[kind].block_tokens;
  Asked asked{.kind = kind, .blocks = {}};
  for (std::size_t block = first; block < blocks; ++block) {
    if (!is_here(kind, block)) asked.blocks.push_back(block);
  }
  return asked;
}

PeerSearch::Asked PeerSearch::needed_until(std::size_t kind, std::uint64_t tokens) const {
  const engine::BlockKind& rule = wants_.rules.kinds[kind];
  const std::uint64_t alignment = wants_.rules.alignment_tokens;
  Asked asked{.kind = kind, .blocks = {}};
  std::size_t next = 0;  // Windows overlap.
  for (std::uint64_t end = std::max(local_, wants_.local_tokens) + alignment; end <= tokens;
       end += alignment) {
    const engine::BlockRange range = engine::BlockKinds::needed(rule, end);
    for (next = std::max(next, range.first); next < range.end(); ++next) {
      if (!is_here(kind, next)) asked.blocks.push_back(next);
    }
  }
  return asked;
}

kj::Promise<void> PeerSearch::ask(Asked asked) {
  if (asked.blocks.empty()) return kj::READY_NOW;
  std::vector<BlockKey> keys;
  keys.reserve(asked.blocks.size());
  for (const std::size_t block : asked.blocks) keys.push_back(keys_.of(asked.kind, block));
  const bool is_prefix = wants_.rules.kinds[asked.kind].rule == engine::KindRule::kPrefix;
  const Bytes32& space = wants_.kinds[asked.kind].space;
  auto answers =
      is_prefix ? source_.locate_prefixes(space, keys) : source_.locate_each(space, keys);
  return answers.then(
      [this, asked = std::move(asked)](std::vector<cluster::Source::Holding>&& each) {
        note(asked, std::move(each));
      });
}

void PeerSearch::note(const Asked& asked, std::vector<cluster::Source::Holding> answers) {
  const std::size_t kinds = wants_.kinds.size();
  for (cluster::Source::Holding& answer : answers) {
    const auto is_its = [&](const Owner& owner) {
      return std::any_of(owner.holdings.begin(), owner.holdings.end(),
                         [&](const auto& known) { return known.rate == answer.rate; });
    };
    auto owner = std::find_if(owners_.begin(), owners_.end(), is_its);
    if (owner == owners_.end()) {
      owners_.push_back({.has = std::vector<std::vector<bool>>(kinds),
                         .holdings = std::vector<cluster::Source::Holding>(kinds)});
      owner = std::prev(owners_.end());
    }
    std::vector<bool>& has = owner->has[asked.kind];
    has.resize(blocks_of(asked.kind));
    for (std::size_t i = 0; i < asked.blocks.size(); ++i) has[asked.blocks[i]] = answer.has[i];
    owner->holdings[asked.kind] = std::move(answer);
  }
}

kj::Promise<void> PeerSearch::ask_prefixes() {
  kj::Vector<kj::Promise<void>> asked;
  for (std::size_t kind = 0; kind < wants_.kinds.size(); ++kind) {
    const bool is_prefix = wants_.rules.kinds[kind].rule == engine::KindRule::kPrefix;
    if (is_prefix) asked.add(ask(missing_of_prefix(kind)));
  }
  return kj::joinPromises(asked.releaseAsArray());
}

kj::Promise<void> PeerSearch::ask_others() {
  std::uint64_t limit = prefix_limit(nullptr);
  for (const Owner& owner : owners_) limit = std::max(limit, prefix_limit(&owner));
  kj::Vector<kj::Promise<void>> asked;
  for (std::size_t kind = 0; kind < wants_.kinds.size(); ++kind) {
    const bool is_prefix = wants_.rules.kinds[kind].rule == engine::KindRule::kPrefix;
    if (!is_prefix) asked.add(ask(needed_until(kind, limit)));
  }
  return kj::joinPromises(asked.releaseAsArray());
}

// ---- the result

PeerSearch::Found PeerSearch::choose() const {
  Found found;
  const Owner* best = nullptr;
  for (const Owner& owner : owners_) {
    const std::uint64_t tokens = longest(&owner);
    if (tokens <= std::max(found.tokens, local_)) continue;
    found.tokens = tokens;
    best = &owner;
  }
  if (best == nullptr) return found;
  Union blocks(*this, best);
  const engine::RestorableSearch search(wants_.rules, units_.size(), blocks);
  for (std::size_t kind = 0; kind < wants_.kinds.size(); ++kind) {
    Part part{.kind = kind,
              .blocks = search.wanted(kind, found.tokens, wants_.local_tokens),
              .keys = {},
              .missing = {},
              .owner = {}};
    if (part.blocks.count == 0) continue;
    for (std::size_t i = 0; i < part.blocks.count; ++i) {
      part.keys.push_back(keys_.of(kind, part.blocks.first + i));
      if (!is_here(kind, part.blocks.first + i)) part.missing.push_back(i);
    }
    if (!part.missing.empty()) {
      const cluster::Source::Holding& holding = best->holdings[kind];
      part.owner = holding.located(part.missing.size());
      const bool has_disks = found.owner.on_disks.blocks != 0;
      if (!has_disks) found.owner = part.owner;
    }
    found.parts.push_back(std::move(part));
  }
  return found;
}

}  // namespace pegaflow::server
