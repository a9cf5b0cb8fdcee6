// The calls of CacheService from and for other nodes.
#include <algorithm>
#include <charconv>
#include <limits>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "base/page_layout.h"
#include "server/cache/cache_service_impl.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"cache"};

/// Above this count, the names of namespaces that no longer exist are removed.
constexpr std::size_t kManySpaces = 512;

std::vector<std::uint64_t> sizes_of(const engine::NamespaceTable::Kind& kind) {
  std::vector<std::uint64_t> sizes;
  for (const engine::Shape::Shard& shard : kind.shape.shards) sizes.push_back(shard.page_bytes);
  return sizes;
}

/// The tokens of a block of a namespace that registered no kinds, as its engine named them.
std::uint32_t tokens_of(const std::vector<engine::NamespaceFactor>& factors) {
  std::uint32_t tokens = 0;
  for (const engine::NamespaceFactor& factor : factors) {
    if (factor.name != "block_tokens") continue;
    std::from_chars(factor.value.data(), factor.value.data() + factor.value.size(), tokens);
  }
  return tokens;
}

}  // namespace

std::uint64_t CacheService::Wants::block_bytes() const {
  return std::accumulate(page_bytes.begin(), page_bytes.end(), std::uint64_t{0});
}

Bytes32 CacheService::name_of(const engine::NamespaceTable::Namespace& space,
                              std::size_t kind) const {
  const std::vector<std::uint64_t> page_bytes = sizes_of(space.kinds[kind]);
  if (space.rules.kinds.empty()) return cluster::space_name(space.factors, page_bytes);
  std::vector<std::uint64_t> numbers = {kind, space.rules.unit_tokens,
                                        space.rules.alignment_tokens};
  for (const engine::BlockKind& each : space.rules.kinds) {
    numbers.insert(numbers.end(),
                   {static_cast<std::uint64_t>(each.rule), each.tokens, each.block_tokens});
  }
  return cluster::space_name(space.factors, page_bytes, numbers);
}

void CacheService::name_spaces(Instance& instance) {
  const engine::NamespaceTable::Namespace& space = *namespaces_->find(instance.space_name);
  instance.spaces.clear();
  for (std::size_t kind = 0; kind < space.kinds.size(); ++kind) {
    instance.spaces.push_back(name_of(space, kind));
  }
  if (spaces_.size() > kManySpaces) {
    forget_names(
        [this](const auto& entry) { return namespaces_->find(entry.second.id) == nullptr; });
  }
  // A namespace that lost its shapes with its last user has others now, and with them other names;
  // see NamespaceTable::leave().
  forget_names([&](const auto& entry) {
    return entry.second.id == space.id && std::find(instance.spaces.begin(), instance.spaces.end(),
                                                    entry.first) == instance.spaces.end();
  });
  // A known name has this epoch already: see retire_outdated().
  for (std::size_t kind = 0; kind < space.kinds.size(); ++kind) {
    if (kind != 0) epochs_.alias(instance.spaces[kind], instance.spaces.front());
    spaces_.insert_or_assign(instance.spaces[kind],
                             Named{.id = space.id,
                                   .kind = kind,
                                   .page_bytes = sizes_of(space.kinds[kind]),
                                   .epoch = epochs_.of(instance.spaces[kind])});
  }
  record_names();
}

template <typename IsOver>
void CacheService::forget_names(IsOver&& is_over) {
  std::erase_if(spaces_, [&](const auto& entry) {
    if (!is_over(entry)) return false;
    epochs_.forget_alias(entry.first);
    return true;
  });
}

void CacheService::retire_outdated() {
  bool is_reset = false;
  for (auto& [name, named] : spaces_) {
    const Epoch epoch = epochs_.of(name);
    if (named.epoch == epoch) continue;
    named.epoch = epoch;
    const engine::NamespaceTable::Namespace* const space = namespaces_->find(named.id);
    // The kinds of a namespace have one epoch and are reset together.
    if (space == nullptr || named.kind != 0) continue;
    namespaces_->reset(named.id);
    is_reset = true;
    ++counted_.resets_learned;
    kLog.info("a namespace was reset namespace={} generation={} epoch={}.{:x}", space->hash,
              space->generation, epoch.counter, epoch.id);
  }
  waits_.settle();
  if (is_reset && on_reset_) on_reset_();
}

bool CacheService::meets(const Bytes32& space, const Epoch& theirs) {
  epochs_.learn(space, theirs);
  return epochs_.of(space) == theirs;
}

const engine::NamespaceTable::Kind* CacheService::kind_called(const Bytes32& name) const {
  const auto found = spaces_.find(name);
  if (found == spaces_.end()) return nullptr;
  const engine::NamespaceTable::Namespace* const space = namespaces_->find(found->second.id);
  if (space == nullptr || found->second.kind >= space->kinds.size()) return nullptr;
  if (is_closed_ || is_held_back(space->id)) return nullptr;
  const engine::NamespaceTable::Kind& kind = space->kinds[found->second.kind];
  // The reader copies pages of the sizes that the name stands for: even if the namespace has
  // another shape by now, none of another size are found or lent by that name.
  return sizes_of(kind) == found->second.page_bytes ? &kind : nullptr;
}

// ---- fetches from other nodes

Result<CacheService::Wants> CacheService::wants(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (!serves(instance)) {
    return fail(Errc::kGone, "a rank of instance {} is not connected", instance.id);
  }
  return wants_of(instance, 0);
}

std::optional<CacheService::Wants> CacheService::wants_by_name(const Bytes32& space) const {
  const engine::NamespaceTable::Kind* const found = kind_called(space);
  if (found == nullptr) return std::nullopt;
  return Wants{.space = space, .generation = found->space, .page_bytes = sizes_of(*found)};
}

CacheService::Wants CacheService::wants_of(const Instance& instance, std::size_t kind) const {
  return {.space = instance.spaces[kind],
          .generation = space_of(instance, kind),
          .page_bytes = sizes_of(namespaces_->find(instance.space_name)->kinds[kind])};
}

Result<CacheService::WantsOfKinds> CacheService::wants_of_kinds(const Id128& connection,
                                                                std::size_t local_units) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  PEGA_TRY_LET(const std::uint64_t local, local_tokens(instance, local_units));
  if (!serves(instance)) {
    return fail(Errc::kGone, "a rank of instance {} is not connected", instance.id);
  }
  WantsOfKinds wants{.rules = instance.rules, .local_tokens = local, .kinds = {}};
  for (std::size_t kind = 0; kind < instance.rules.kinds.size(); ++kind) {
    wants.kinds.push_back(wants_of(instance, kind));
  }
  return wants;
}

bool CacheService::has_room_to_fetch(const Id128& connection,
                                     std::span<const engine::BlockStore::ClaimPart> parts) {
  const auto caller = member(connection);
  return caller && store_->has_room_to_fetch(*(*caller)->holder, parts);
}

Result<CacheService::Fetch> CacheService::fetch(const Id128& connection, engine::SpaceId generation,
                                                const Id128& token, std::size_t first,
                                                std::span<const BlockKey> keys,
                                                std::size_t fetchable, std::size_t kind) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  const Instance& instance = *caller->instance;
  if (!serves(instance)) {
    return fail(Errc::kGone, "a rank of instance {} is not connected", instance.id);
  }
  if (space_of(instance, kind) != generation) {
    return fail(Errc::kGone, "the namespace was reset since the claim was made");
  }
  PEGA_TRY_LET(const engine::BlockStore::Fetch planned,
               store_->fetch(*caller->holder, generation, token, first, keys, fetchable));
  return with_pages(planned, instance.shards);
}

CacheService::Fetch CacheService::with_pages(const engine::BlockStore::Fetch& planned,
                                             std::uint32_t shards) const {
  Fetch fetch{.blocks = planned.blocks, .coming = planned.in_flight, .frames = {}};
  fetch.frames.reserve(planned.frames.size());
  for (const engine::BlockStore::Fetch::Frame& frame : planned.frames) {
    Fetched& to = fetch.frames.emplace_back();
    to.place = frame.place;
    to.frame = frame.frame;
    for (std::uint32_t shard = 0; shard < shards; ++shard) {
      to.offsets.push_back(store_->page_offset(frame.frame, shard));
    }
  }
  return fetch;
}

Result<void> CacheService::join_claims(const Id128& connection, std::span<const Id128> tokens) {
  PEGA_TRY_LET(Client* const caller, member(connection));
  return store_->join_claims(*caller->holder, tokens);
}

void CacheService::fetched(engine::FrameIndex frame, std::uint32_t shards,
                           std::span<const std::uint64_t> checksums) {
  const std::uint64_t bytes = note_checksums(frame, shards, checksums);
  if (store_->fetched(frame)) counted_.fetch_bytes += bytes;
}

void CacheService::restored(engine::FrameIndex frame, std::uint32_t shards,
                            std::span<const std::uint64_t> checksums,
                            const engine::ssd::Proven& proven) {
  note_checksums(frame, shards, checksums);
  store_->restored(frame, proven);
}

void CacheService::staged(engine::FrameIndex frame, std::uint32_t shards,
                          std::span<const std::uint64_t> checksums,
                          const engine::ssd::Proven& proven) {
  note_checksums(frame, shards, checksums);
  store_->staged(frame, proven);
}

std::uint64_t CacheService::note_checksums(engine::FrameIndex frame, std::uint32_t shards,
                                           std::span<const std::uint64_t> checksums) {
  // Before the block can be opened. The page that was there before may have left its own.
  std::uint64_t bytes = 0;
  for (std::uint32_t shard = 0; shard < shards; ++shard) {
    const std::uint64_t page_bytes = store_->page_bytes(frame, shard);
    if (page_bytes == 0) continue;  // The shard has no page of this kind.
    bytes += page_bytes;
    const std::uint64_t checksum =
        checksums.empty() ? engine::ChecksumTable::kNone : checksums[shard];
    if (checksum != engine::ChecksumTable::kNone || !checksums_.is_empty()) {
      checksums_.set(store_->page_number(frame, shard), checksum);
    }
  }
  return bytes;
}

void CacheService::give_up(engine::FrameIndex frame) { store_->give_up(frame); }
void CacheService::quiesce_fetch(engine::FrameIndex frame) { store_->quiesced(frame); }
bool CacheService::is_awaited(engine::FrameIndex frame) const { return store_->is_awaited(frame); }

Result<CacheService::Opened> CacheService::open_arrived(const Id128& connection, const Id128& token,
                                                        std::size_t first, std::size_t count,
                                                        engine::PinId pin) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  PEGA_TRY(check_claim(*caller, token));
  PEGA_TRY_LET(const std::size_t there, store_->arrived(token, first, std::min(count, kOpenSlice)));
  if (there == 0) return Opened{.slots = {}, .checksums = {}, .coming = count};
  PEGA_TRY_LET(Opened opened, open(connection, token, first, there, pin));
  opened.coming = count - there;
  return opened;
}

Result<std::size_t> CacheService::arrived(const Id128& token, std::size_t first,
                                          std::size_t count) const {
  return store_->arrived(token, first, count);
}

std::uint64_t CacheService::page_bytes(const Id128& connection, const Id128& token) {
  const auto caller = worker(connection);
  if (!caller) return 0;
  const auto kind = check_claim(**caller, token);
  return kind ? (*caller)->instance->ranks[(*caller)->rank].page_bytes[*kind] : 0;
}

CacheService::PoolAccess CacheService::pool_access(const Id128& connection) {
  const auto caller = member(connection);
  if (!caller || !serves(*(*caller)->instance)) return {};
  const std::vector<Rank>& ranks = (*caller)->instance->ranks;
  PoolAccess access{.backend = ranks.front().pool_backend,
                    .piece_bytes = std::numeric_limits<std::uint64_t>::max()};
  for (const Rank& rank : ranks) {
    if (rank.pool_backend != access.backend) return {};
    access.piece_bytes = std::min(access.piece_bytes, rank.page_bytes.front() / rank.segments);
    access.is_slow = access.is_slow || rank.reads_pools_slowly;
  }
  return access;
}

Result<CacheService::PoolReader> CacheService::pool_reader(const Id128& connection) {
  PEGA_TRY_LET(Client* const caller, worker(connection));
  const Instance& instance = *caller->instance;
  if (!serves(instance)) {
    return fail(Errc::kGone, "a rank of instance {} is not connected", instance.id);
  }
  const Rank& rank = instance.ranks[caller->rank];
  return PoolReader{.generation = space_of(instance, 0),
                    .shard = rank.shard,
                    .page_bytes = rank.page_bytes.front()};
}

void CacheService::note_pool_read(const Id128& connection, std::size_t blocks) {
  const auto caller = worker(connection);
  if (!caller) return;
  const Instance& instance = *(*caller)->instance;
  const std::uint64_t bytes = blocks * instance.ranks[(*caller)->rank].page_bytes.front();
  counted(instance, 0).loaded_blocks += blocks;
  counted(instance, 0).loaded_bytes += bytes;
  counted_.load_bytes += bytes;
  counted_.load_blocks_other += blocks;
}

std::optional<engine::FrameIndex> CacheService::claimed_frame(const Id128& token,
                                                              std::size_t place) const {
  return store_->claimed_frame(token, place);
}

// ---- a tier below the pool

std::optional<engine::ssd::Origin> CacheService::origin_of(const Bytes32& space) const {
  const auto found = spaces_.find(space);
  if (found == spaces_.end() || kind_called(space) == nullptr) return std::nullopt;
  const Epoch epoch = epochs_.of(space);
  return engine::ssd::Origin{.name = space,
                             .kind = static_cast<std::uint16_t>(found->second.kind),
                             .epoch = {.counter = epoch.counter, .id = epoch.id}};
}

std::optional<CacheService::Stored> CacheService::stored(engine::FrameIndex frame) const {
  const auto resident = store_->resident(frame);
  if (!resident || resident->is_replica) return std::nullopt;
  for (const auto& [name, named] : spaces_) {
    const engine::NamespaceTable::Kind* const kind = kind_called(name);
    if (kind == nullptr || kind->space != resident->space) continue;
    Stored stored{.origin = *origin_of(name),
                  .key = resident->key,
                  .offsets = {},
                  .page_bytes = {},
                  .checksums = {},
                  .was_used = resident->was_used,
                  .came_back = resident->came_back,
                  .depth = resident->depth};
    const auto shards = static_cast<std::uint32_t>(kind->shape.shards.size());
    const bool has_kinds = !namespaces_->find(named.id)->rules.kinds.empty();
    for (std::uint32_t shard = 0; shard < shards; ++shard) {
      const std::uint64_t bytes = store_->page_bytes(frame, shard);
      if (bytes == 0) continue;
      stored.offsets.push_back(store_->page_offset(frame, shard));
      stored.page_bytes.push_back(bytes);
      if (has_kinds) continue;
      stored.checksums.push_back(checksums_[store_->page_number(frame, shard)]);
    }
    return stored;
  }
  return std::nullopt;
}

void CacheService::note_disk_failed(const engine::ssd::Origin& origin, const BlockKey& key) {
  // After a reset the block is lost for that reason.
  if (origin_of(origin.name) != origin) return;
  store_->note_lost(kind_called(origin.name)->space, key, engine::Miss::kDiskFailed);
}

void CacheService::invalidate(engine::FrameIndex frame) {
  if (store_->invalidate(frame)) ++counted_.corrupt_pages;
}

// ---- reads by other nodes

std::size_t CacheService::present(const Bytes32& space, std::span<const BlockKey> keys) const {
  const engine::NamespaceTable::Kind* const found = kind_called(space);
  return found == nullptr ? 0 : store_->present(found->space, keys);
}

std::vector<bool> CacheService::present_each(const Bytes32& space,
                                             std::span<const BlockKey> keys) const {
  std::vector<bool> present(keys.size());
  const engine::NamespaceTable::Kind* const found = kind_called(space);
  if (found == nullptr) return present;
  constexpr std::size_t kGroup = 64;
  for (std::size_t first = 0; first < keys.size(); first += kGroup) {
    const std::size_t count = std::min(kGroup, keys.size() - first);
    const std::uint64_t bits = store_->present_each(found->space, keys.subspan(first, count));
    for (std::size_t i = 0; i < count; ++i) present[first + i] = (bits >> i & 1) != 0;
  }
  return present;
}

Result<CacheService::Lent> CacheService::lend(const Bytes32& space, std::span<const BlockKey> keys,
                                              Duration time) {
  const engine::NamespaceTable::Kind* const found = kind_called(space);
  if (found == nullptr) return Lent{};
  const auto shards = static_cast<std::uint32_t>(found->shape.shards.size());
  PEGA_TRY_LET(const engine::BlockStore::Lent lent, store_->lend(found->space, keys, time));
  Lent answer{.lease = lent.lease, .blocks = lent.frames.size(), .pages = {}, .checksums = {}};
  answer.pages.reserve(lent.frames.size() * shards);
  bool has_one = false;
  for (const engine::FrameIndex frame : lent.frames) {
    for (std::uint32_t shard = 0; shard < shards; ++shard) {
      answer.pages.push_back(
          static_cast<std::uint32_t>(store_->page_offset(frame, shard) / kSlotAlignment));
      counted_.lent_bytes += store_->page_bytes(frame, shard);
      if (checksums_.is_empty()) continue;
      answer.checksums.push_back(checksums_[store_->page_number(frame, shard)]);
      has_one = has_one || answer.checksums.back() != engine::ChecksumTable::kNone;
    }
  }
  if (!has_one) answer.checksums.clear();
  return answer;
}

Result<CacheService::Fetch> CacheService::stage(const Wants& wants, const Id128& token,
                                                std::size_t first, std::span<const BlockKey> keys) {
  // No instance has this number.
  if (!nodes_) nodes_ = store_->add_holder(0, Id128{});
  PEGA_TRY_LET(const engine::BlockStore::Fetch planned,
               store_->fetch(*nodes_, wants.generation, token, first, keys, keys.size()));
  return with_pages(planned, static_cast<std::uint32_t>(wants.page_bytes.size()));
}

Result<CacheService::Fetch> CacheService::prefetch(const Wants& wants, const Id128& token,
                                                   std::size_t first,
                                                   std::span<const BlockKey> keys,
                                                   std::size_t fetchable) {
  if (!nodes_) nodes_ = store_->add_holder(0, Id128{});
  PEGA_TRY_LET(const engine::BlockStore::Fetch planned,
               store_->fetch(*nodes_, wants.generation, token, first, keys, fetchable,
                             engine::BlockStore::Evicts::kReplicas));
  return with_pages(planned, static_cast<std::uint32_t>(wants.page_bytes.size()));
}

void CacheService::end_staging(const Id128& token) {
  if (nodes_) store_->unclaim(*nodes_, token);
}

void CacheService::end_lease(engine::LeaseId lease) { store_->end_lease(lease); }
bool CacheService::is_lent(engine::LeaseId lease) const { return store_->is_lent(lease); }

void CacheService::await_job_for(const Id128& peer_connection, const JobId& job, Duration patience,
                                 JobWaits::Answer answer, JobWaits::Until until) {
  const auto served = schedulers_.find(job.scheduler);
  const bool is_served = served != schedulers_.end() && served->second->is_complete();
  waits_.wait(peer_connection, job, is_served, patience, std::move(answer), until);
}

void CacheService::peer_left(const Id128& peer_connection) { waits_.forget(peer_connection); }

// ---- routers

Result<CacheService::Indexed> CacheService::indexed(std::string_view namespace_hash,
                                                    std::optional<std::size_t> kind) const {
  for (const engine::NamespaceTable::Namespace* const space : namespaces_->all()) {
    if (space->hash != namespace_hash || !space->has_shapes()) continue;
    const std::vector<engine::BlockKind>& rules = space->rules.kinds;
    const auto is_prefix = [](const engine::BlockKind& each) {
      return each.rule == engine::KindRule::kPrefix;
    };
    const std::size_t first = static_cast<std::size_t>(
        std::find_if(rules.begin(), rules.end(), is_prefix) - rules.begin());
    const std::size_t number = kind.value_or(rules.empty() ? 0 : first);
    if (number >= space->kinds.size()) {
      return fail(Errc::kInvalidArgument, "the namespace has {} kinds of blocks, and no kind {}",
                  space->kinds.size(), number);
    }
    if (!rules.empty() && !is_prefix(rules[number])) {
      return fail(Errc::kInvalidArgument,
                  "kind {} has the rule {}: an index has prefixes, which rule full has", number,
                  engine::to_string(rules[number].rule));
    }
    auto wants = wants_by_name(name_of(*space, number));
    if (!wants) {
      return fail(Errc::kBusy, "the blocks of the namespace are not served now; see /health");
    }
    return Indexed{
        .wants = std::move(*wants),
        .kind = number,
        .block_tokens = rules.empty() ? tokens_of(space->factors) : rules[number].block_tokens};
  }
  return fail(Errc::kGone, "no engine has registered namespace {} here", namespace_hash);
}

std::vector<CacheService::Announced> CacheService::announced(std::size_t limit) const {
  std::vector<Announced> all;
  for (const auto& [name, named] : spaces_) {
    if (all.size() == limit) break;
    if (const auto* const kind = kind_called(name)) {
      all.push_back({.name = name, .generation = kind->space, .epoch = named.epoch});
    }
  }
  return all;
}

}  // namespace pegaflow::server
