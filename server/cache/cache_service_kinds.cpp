// Lookups and claims of namespaces with several kinds of blocks.
#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "engine/kinds/restorable.h"
#include "server/cache/cache_service_impl.h"

namespace pegaflow::server {
namespace {

/// The keys of consecutive blocks of one kind, among those of the prompt's units.
std::vector<BlockKey> keys_of(const engine::BlockKinds& rules, const engine::BlockKind& kind,
                              const engine::BlockRange& range, std::span<const BlockKey> units) {
  std::vector<BlockKey> keys;
  keys.reserve(range.count);
  for (std::size_t block = range.first; block < range.end(); ++block) {
    keys.push_back(units[rules.key_of(kind, block)]);
  }
  return keys;
}

/// The blocks of one prompt in the store.
class StoredBlocks final : public engine::BlockPresence {
 public:
  StoredBlocks(const engine::BlockStore& store, const engine::NamespaceTable::Namespace& space,
               const engine::BlockKinds& rules, std::span<const BlockKey> units)
      : store_(store), space_(space), rules_(rules), units_(units) {}

  std::uint64_t present(std::size_t kind, std::size_t first, std::size_t count) override {
    const auto keys = keys_of(rules_, rules_.kinds[kind], {.first = first, .count = count}, units_);
    return store_.present_each(space_.space(kind), keys);
  }

 private:
  const engine::BlockStore& store_;
  const engine::NamespaceTable::Namespace& space_;
  const engine::BlockKinds& rules_;
  std::span<const BlockKey> units_;
};

}  // namespace

Id128 claim_of_kind(const Id128& token, std::size_t kind) {
  if (kind == 0 || token.is_none()) return token;
  return {.high = token.high ^ (kind * 0x9E3779B97F4A7C15ULL), .low = token.low};
}

Result<bool> CacheService::has_kinds(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  return !caller->instance->rules.kinds.empty();
}

bool CacheService::is_complete(const Id128& connection) {
  const auto caller = member(connection);
  return caller && (*caller)->instance->is_complete();
}

Result<CacheService::Restorable> CacheService::restorable(const Id128& connection,
                                                          std::span<const BlockKey> units,
                                                          std::size_t local_units) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (!instance.is_complete()) {
    counted_.lookup_blocks_not_served += units.size();
    return Restorable{};
  }
  const engine::BlockKinds& rules = instance.rules;
  PEGA_TRY_LET(const std::uint64_t local, local_tokens(instance, local_units));
  StoredBlocks blocks(*store_, *namespaces_->find(instance.space_name), rules, units);
  engine::RestorableSearch search(rules, units.size(), blocks);
  const std::uint64_t tokens = search.longest(local);
  Restorable found{.units = tokens / rules.unit_tokens, .complete = true, .ranges = {}};
  for (std::size_t kind = 0; tokens != 0 && kind < rules.kinds.size(); ++kind) {
    const engine::BlockRange range = search.wanted(kind, tokens, local);
    if (range.count != 0) found.ranges.push_back({.kind = kind, .blocks = range});
  }
  return found;
}

Result<CacheService::Restorable> CacheService::claim_restorable(const Id128& connection,
                                                                const Id128& token,
                                                                std::span<const BlockKey> units,
                                                                std::size_t local_units) {
  PEGA_TRY_LET(Restorable found, restorable(connection, units, local_units));
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  for (const Restorable::Range& range : found.ranges) {
    const auto keys =
        keys_of(instance.rules, instance.rules.kinds[range.kind], range.blocks, units);
    const auto claimed = store_->claim(*caller->holder, space_of(instance, range.kind), keys,
                                       claim_of_kind(token, range.kind));
    if (claimed && *claimed == keys.size()) continue;
    // All of them or none: without one kind the others are of no use.
    unclaim_kinds(*caller, token);
    if (!claimed) return tl::unexpected<Error>(claimed.error());
    return Restorable{.units = 0, .complete = true, .ranges = {}};
  }
  return found;
}

Result<std::vector<std::byte>> CacheService::boundaries(const Id128& connection,
                                                        std::span<const BlockKey> units,
                                                        std::size_t local_units) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (instance.rules.kinds.empty()) {
    return fail(Errc::kInvalidArgument, "boundaries: instance {} has one kind of blocks",
                instance.id);
  }
  if (!instance.is_complete()) return std::vector<std::byte>();
  const engine::BlockKinds& rules = instance.rules;
  PEGA_TRY_LET(const std::uint64_t local, local_tokens(instance, local_units));
  StoredBlocks blocks(*store_, *namespaces_->find(instance.space_name), rules, units);
  engine::RestorableSearch search(rules, units.size(), blocks);
  std::vector<std::byte> bits;
  for (const std::uint64_t tokens : search.all(local)) {
    const std::size_t bit = tokens / rules.alignment_tokens - 1;
    if (bits.size() <= bit / 8) bits.resize(bit / 8 + 1);
    bits[bit / 8] |= std::byte{1} << (bit % 8);
  }
  return bits;
}

Result<std::uint64_t> CacheService::local_tokens(const Instance& instance,
                                                 std::size_t local_units) const {
  const std::uint64_t tokens = std::uint64_t{local_units} * instance.rules.unit_tokens;
  if (tokens % instance.rules.alignment_tokens != 0) {
    return fail(Errc::kInvalidArgument,
                "{} tokens that the engine has are not a multiple of the alignment of {}", tokens,
                instance.rules.alignment_tokens);
  }
  return tokens;
}

void CacheService::unclaim_kinds(Client& client, const Id128& token) {
  const std::size_t kinds = std::max<std::size_t>(1, client.instance->rules.kinds.size());
  for (std::size_t kind = 0; kind < kinds; ++kind) {
    store_->unclaim(*client.holder, claim_of_kind(token, kind));
  }
}

}  // namespace pegaflow::server
