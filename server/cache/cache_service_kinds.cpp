// Lookups and claims of namespaces with several kinds of blocks.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include "engine/kinds/restorable.h"
#include "engine/kinds/unit_keys.h"
#include "server/cache/cache_service_impl.h"

namespace pegaflow::server {
namespace {

/// The blocks of one prompt in the store.
class StoredBlocks final : public engine::BlockPresence {
 public:
  StoredBlocks(const engine::BlockStore& store, const engine::NamespaceTable::Namespace& space,
               std::span<const BlockKey> units)
      : store_(store),
        space_(space),
        keys_(space.rules, units),
        not_held_(space.kinds.size(), {0}) {}

  std::uint64_t present(std::size_t kind, std::size_t first, std::size_t count) override {
    return store_.present_each(space_.space(kind),
                               keys_.of(kind, {.first = first, .count = count}, scratch_));
  }

  [[nodiscard]] std::uint64_t frame_bytes(std::size_t kind) const {
    return store_.frame_bytes(space_.space(kind));
  }

  /// The number of blocks of a range, all of them present, that nothing holds yet. Looks at each
  /// block once.
  [[nodiscard]] std::size_t count_not_held(std::size_t kind, const engine::BlockRange& range) {
    std::vector<std::size_t>& sums = not_held_[kind];
    while (sums.size() <= range.end()) {
      const std::size_t first = sums.size() - 1;
      const std::size_t count = std::min<std::size_t>(64, range.end() - first);
      const std::uint64_t held = store_.held_each(
          space_.space(kind), keys_.of(kind, {.first = first, .count = count}, scratch_));
      for (std::size_t i = 0; i < count; ++i) sums.push_back(sums.back() + (~held >> i & 1));
    }
    return sums[range.end()] - sums[range.first];
  }

 private:
  const engine::BlockStore& store_;
  const engine::NamespaceTable::Namespace& space_;
  engine::UnitKeys keys_;
  std::vector<BlockKey> scratch_;
  /// By kind: element i counts the blocks before block i that nothing holds.
  std::vector<std::vector<std::size_t>> not_held_;
};

}  // namespace

// ---- one lookup or claim

/// The search of one call, and the blocks that its results need.
class CacheService::PromptSearch {
 public:
  PromptSearch(const CacheService& service, const Instance& instance,
               std::span<const BlockKey> units, std::uint64_t local_tokens)
      : rules_(instance.rules),
        local_tokens_(local_tokens),
        blocks_(*service.store_, *service.namespaces_->find(instance.space_name), units),
        search_(rules_, units.size(), blocks_) {}

  [[nodiscard]] std::uint64_t longest() { return search_.longest(local_tokens_); }
  [[nodiscard]] const auto& shortened() const { return search_.shortened(); }
  [[nodiscard]] std::vector<std::uint64_t> all() { return search_.all(local_tokens_); }

  /// A restorable prefix of `tokens`; 0: none.
  [[nodiscard]] Restorable restorable(std::uint64_t tokens) const {
    Restorable found{.units = tokens / rules_.unit_tokens, .complete = true, .ranges = {}};
    for (std::size_t kind = 0; tokens != 0 && kind < rules_.kinds.size(); ++kind) {
      const engine::BlockRange range = search_.wanted(kind, tokens, local_tokens_);
      if (range.count != 0) found.ranges.push_back({.kind = kind, .blocks = range});
    }
    return found;
  }

  /// The longest prefix shorter than `tokens` that can be claimed within `room`; 0: none.
  [[nodiscard]] std::uint64_t shorter(std::uint64_t tokens,
                                      const engine::BlockStore::ClaimRoom& room) {
    const std::vector<std::uint64_t> lengths = all();
    const auto fits = [&](std::uint64_t length) {
      const Restorable prefix = restorable(length);
      std::uint64_t bytes = 0;
      for (const auto& [kind, blocks] : prefix.ranges) {
        bytes += blocks.count * blocks_.frame_bytes(kind);
      }
      if (length >= tokens || bytes > room.bytes) return false;
      std::uint64_t new_bytes = 0;
      for (const auto& [kind, blocks] : prefix.ranges) {
        new_bytes += blocks_.count_not_held(kind, blocks) * blocks_.frame_bytes(kind);
      }
      return new_bytes <= room.new_bytes;
    };
    const auto found = std::find_if(lengths.rbegin(), lengths.rend(), fits);
    return found == lengths.rend() ? 0 : *found;
  }

 private:
  const engine::BlockKinds& rules_;
  std::uint64_t local_tokens_;
  StoredBlocks blocks_;
  engine::RestorableSearch search_;
};

// ---- claims of kinds

namespace {

/// The token of the claim on the blocks of one kind. Kind 0 has the token itself.
Id128 token_of_kind(const Id128& token, std::size_t kind) {
  if (kind == 0 || token.is_none()) return token;
  return {.high = token.high ^ (kind * 0x9E3779B97F4A7C15ULL), .low = token.low};
}

}  // namespace

Result<Id128> CacheService::claim_of_kind(const Id128& connection, const Id128& token,
                                          std::size_t kind) {
  if (kind == 0) return token;
  PEGA_TRY_LET(Client* const caller, member(connection));
  PEGA_TRY(check_kind(*caller->instance, kind));
  return token_of_kind(token, kind);
}

Result<void> CacheService::check_kind(const Instance& instance, std::size_t kind) const {
  const std::size_t kinds = std::max<std::size_t>(1, instance.rules.kinds.size());
  if (kind < kinds) return {};
  return fail(Errc::kInvalidArgument, "kind {} of instance {}, whose blocks are of {}", kind,
              instance.id, kinds == 1 ? "one kind" : fmt::format("{} kinds", kinds));
}

std::optional<std::size_t> CacheService::kind_of(const Instance& instance,
                                                 engine::SpaceId space) const {
  const engine::NamespaceTable::Namespace& known = *namespaces_->find(instance.space_name);
  const auto found = std::find_if(known.kinds.begin(), known.kinds.end(),
                                  [&](const auto& kind) { return kind.space == space; });
  if (found == known.kinds.end()) return std::nullopt;
  return static_cast<std::size_t>(found - known.kinds.begin());
}

KindStats& CacheService::counted(const Instance& instance, std::size_t kind) {
  const engine::KindRule rule =
      instance.rules.kinds.empty() ? engine::KindRule::kPrefix : instance.rules.kinds[kind].rule;
  return counted_.kinds[static_cast<std::size_t>(rule)];
}

Result<bool> CacheService::has_kinds(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  return !caller->instance->rules.kinds.empty();
}

Result<CacheService::Restorable> CacheService::restorable(const Id128& connection,
                                                          std::span<const BlockKey> units,
                                                          std::size_t local_units, Counted when) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  PEGA_TRY_LET(const std::uint64_t local, local_tokens(instance, local_units));
  if (!serves(instance)) {
    counted_.lookup_blocks_not_served += units.size();
    return Restorable{};
  }
  PromptSearch search(*this, instance, units, local);
  const std::uint64_t tokens = search.longest();
  const FirstKind blocks = first_kind(instance, units, local, tokens, tokens);
  if (when == Counted::kNow) store_->note_lookup(space_of(instance), blocks.keys, blocks.found);
  demand_->requested(space_of(instance), blocks.keys, blocks.found, instance.block_bytes.front());
  if (const auto& shortened = search.shortened()) {
    KindStats& by_kind = counted(instance, shortened->kind);
    ++by_kind.shortened_lookups;
    by_kind.shortened_tokens += shortened->tokens;
  }
  return search.restorable(tokens);
}

void CacheService::note_restorable(const Id128& connection, std::span<const BlockKey> units,
                                   std::size_t local_units, std::size_t found,
                                   std::size_t reachable) {
  const auto caller = member(connection);
  if (!caller || (*caller)->instance->rules.kinds.empty()) return;
  const Instance& instance = *(*caller)->instance;
  const auto local = local_tokens(instance, local_units);
  if (!local) return;
  const std::uint64_t unit = instance.rules.unit_tokens;
  const FirstKind blocks = first_kind(instance, units, *local, found * unit, reachable * unit);
  store_->note_lookup(space_of(instance), blocks.keys, blocks.found, blocks.elsewhere);
}

CacheService::FirstKind CacheService::first_kind(const Instance& instance,
                                                 std::span<const BlockKey> units,
                                                 std::uint64_t local, std::uint64_t tokens,
                                                 std::uint64_t reachable_tokens) {
  // A block of kind 0 that is present but not restorable is behind a hole.
  const std::uint64_t block = instance.rules.kinds.front().block_tokens;
  const std::size_t blocks = units.size() * instance.rules.unit_tokens / block;
  const std::size_t first = std::min<std::size_t>(blocks, local / block);
  const auto behind_first = [&](std::uint64_t length) -> std::size_t {
    return length / block <= first ? 0 : length / block - first;
  };
  std::vector<BlockKey> scratch;
  const auto keys = engine::UnitKeys(instance.rules, units)
                        .of(0, {.first = first, .count = blocks - first}, scratch);
  FirstKind made{.keys = {keys.begin(), keys.end()}, .found = behind_first(tokens)};
  made.elsewhere = behind_first(std::max(tokens, reachable_tokens)) - made.found;
  return made;
}

Result<CacheService::Restorable> CacheService::claim_restorable(const Id128& connection,
                                                                const Id128& token,
                                                                std::span<const BlockKey> units,
                                                                std::size_t local_units) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  PEGA_TRY_LET(const std::uint64_t local, local_tokens(instance, local_units));
  if (!serves(instance)) return Restorable{};
  PromptSearch search(*this, instance, units, local);
  const std::uint64_t tokens = search.longest();
  Restorable found = search.restorable(tokens);
  PEGA_TRY_LET(const bool is_claimed, claim_all(*caller, token, units, found));
  if (is_claimed) return found;
  // In one event-loop iteration no block is lost: a limit allows less.
  found = search.restorable(search.shorter(tokens, store_->room_to_claim(*caller->holder)));
  PEGA_TRY_LET(const bool is_shorter_claimed, claim_all(*caller, token, units, found));
  return is_shorter_claimed ? found : search.restorable(0);
}

Result<bool> CacheService::claim_all(const Client& caller, const Id128& token,
                                     std::span<const BlockKey> units, const Restorable& wanted) {
  const Instance& instance = *caller.instance;
  const engine::UnitKeys keys(instance.rules, units);
  std::vector<std::vector<BlockKey>> scratch(wanted.ranges.size());
  std::vector<engine::BlockStore::ClaimPart> parts;
  for (std::size_t i = 0; i < wanted.ranges.size(); ++i) {
    const auto& [kind, blocks] = wanted.ranges[i];
    parts.push_back({.space = space_of(instance, kind),
                     .keys = keys.of(kind, blocks, scratch[i]),
                     .token = token_of_kind(token, kind)});
  }
  return store_->claim_together(*caller.holder, parts);
}

Result<CacheService::Boundaries> CacheService::boundaries(const Id128& connection,
                                                          std::span<const BlockKey> units,
                                                          std::size_t local_units) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  PEGA_TRY_LET(const std::uint64_t local, local_tokens(instance, local_units));
  if (!serves(instance)) return Boundaries{};
  PromptSearch search(*this, instance, units, local);
  Boundaries found{.restorable = {}, .complete = true};
  for (const std::uint64_t tokens : search.all()) {
    const std::size_t bit = tokens / instance.rules.alignment_tokens - 1;
    if (found.restorable.size() <= bit / 8) found.restorable.resize(bit / 8 + 1);
    found.restorable[bit / 8] |= std::byte{1} << (bit % 8);
  }
  return found;
}

Result<std::uint64_t> CacheService::local_tokens(const Instance& instance,
                                                 std::size_t local_units) const {
  const engine::BlockKinds& rules = instance.rules;
  if (rules.kinds.empty()) {
    return fail(Errc::kInvalidArgument, "instance {} has not registered kinds of blocks",
                instance.id);
  }
  const std::uint64_t tokens = std::uint64_t{local_units} * rules.unit_tokens;
  if (tokens % rules.alignment_tokens != 0) {
    return fail(Errc::kInvalidArgument,
                "localUnits {}: {} tokens are not a multiple of the alignment of {}", local_units,
                tokens, rules.alignment_tokens);
  }
  return tokens;
}

void CacheService::unclaim_kinds(const Client& client, const Id128& token) {
  // Any of them ends all, and not every kind has one.
  for (std::size_t kind = 0; kind < client.instance->most_kinds; ++kind) {
    store_->unclaim(*client.holder, token_of_kind(token, kind));
  }
}

}  // namespace pegaflow::server
