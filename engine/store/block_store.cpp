#include "engine/block_store.h"

#include <limits>
#include <memory>
#include <utility>

#include "base/assert.h"
#include "base/page_layout.h"
#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

namespace {

constexpr std::uint32_t kMaxRows = std::uint32_t{1} << 31;
constexpr std::uint64_t kMaxPoolBytes = kMaxRows * kSlotAlignment;

/// Identifies the writers of blocks in the 4 bytes that a block has for it. Incarnations are
/// random, so two given processes share a tag once in 2^32; it only feeds a counter.
std::uint32_t writer_tag(const Id128& process) noexcept {
  const std::uint32_t tag = mix_hash(process.high, process.low);
  return tag == kReplica ? 1 : tag;
}

bool is_share(double share) noexcept { return share > 0.0 && share <= 1.0; }

Result<void> validate(const BlockStore::Options& options) {
  if (options.pool_bytes < kSlotAlignment || options.pool_bytes > kMaxPoolBytes) {
    return fail(Errc::kInvalidArgument, "a pool has {} to {} bytes, not {}", kSlotAlignment,
                kMaxPoolBytes, options.pool_bytes);
  }
  if (options.numa_nodes == 0 || options.numa_nodes > kMaxNumaNodes) {
    return fail(Errc::kInvalidArgument, "a pool lies on 1 to {} NUMA nodes, not {}", kMaxNumaNodes,
                options.numa_nodes);
  }
  if (!is_share(options.instance_share) || !is_share(options.server_share)) {
    return fail(Errc::kInvalidArgument, "a share is above 0 and at most 1, not {} and {}",
                options.instance_share, options.server_share);
  }
  if (options.reservation_timeout <= Duration::zero() || options.claim_grace < Duration::zero()) {
    return fail(Errc::kInvalidArgument,
                "reservation_timeout is positive, and claim_grace is not negative");
  }
  if (options.slice_blocks == 0) return fail(Errc::kInvalidArgument, "a slice has 1 block or more");
  for (const double share : {options.fetch_share, options.save_reserve, options.lend_share}) {
    if (share != 0.0 && !is_share(share)) {
      return fail(Errc::kInvalidArgument, "shares of fetches and leases are 0 to 1, not {}", share);
    }
  }
  if (options.longest_lease <= Duration::zero() || options.lease_margin < Duration::zero()) {
    return fail(Errc::kInvalidArgument,
                "longest_lease is positive, and lease_margin is not negative");
  }
  if (options.max_leases == 0 || options.max_leases > 1U << LeaseTable::kRowBits) {
    return fail(Errc::kInvalidArgument, "there are 1 to {} leases, not {}",
                1U << LeaseTable::kRowBits, options.max_leases);
  }
  for (const std::uint32_t rows :
       {options.max_claims, options.max_pins, options.max_reservations}) {
    if (rows == 0 || rows > kMaxRows) {
      return fail(Errc::kInvalidArgument, "a table has 1 to {} rows, not {}", kMaxRows, rows);
    }
  }
  if (std::uint64_t{options.max_claims} + options.max_pins + options.max_leases > kMaxHolds) {
    return fail(Errc::kInvalidArgument,
                "there are at most {} claims, pins and leases, not {}, {} and {}", kMaxHolds,
                options.max_claims, options.max_pins, options.max_leases);
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<BlockStore>> BlockStore::create(const Options& options, const Clock& clock) {
  PEGA_TRY(validate(options));
  PEGA_TRY_LET(auto blocks, BlockTable::create({.pool_bytes = options.pool_bytes,
                                                .numa_nodes = options.numa_nodes,
                                                .eviction = options.eviction}));
  PEGA_TRY_LET(auto claims, ClaimTable::create(options.max_claims));
  PEGA_TRY_LET(auto pins, PinTable::create(options.max_pins));
  PEGA_TRY_LET(auto jobs, JobTable::create(options.max_reservations));
  PEGA_TRY_LET(auto lost, LostBlocks::create(options.remembered_losses));
  return std::unique_ptr<BlockStore>(
      new BlockStore(std::make_unique<Impl>(options, clock, std::move(blocks), std::move(claims),
                                            std::move(pins), std::move(jobs), std::move(lost))));
}

BlockStore::BlockStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BlockStore::~BlockStore() = default;

// ---- shapes

Result<ShapeId> BlockStore::add_shape(const Shape& shape) {
  PEGA_TRY_LET(const BlockTable::Added added, impl_->blocks.add_shape(shape));
  if (added.is_new) impl_->queue.emplace_back(TouchWork{added.id});
  return added.id;
}

void BlockStore::leave_shape(ShapeId shape) { impl_->blocks.leave_shape(shape); }

bool BlockStore::has_blocks(ShapeId shape) const { return impl_->blocks.has_extents(shape); }

std::uint64_t BlockStore::emptied_shapes() const { return impl_->blocks.emptied_shapes(); }

std::uint64_t BlockStore::page_bytes(FrameIndex frame, std::uint32_t shard) const {
  return impl_->blocks.shape(impl_->blocks.shape_of(frame)).shards[shard].page_bytes;
}

std::uint32_t BlockStore::page_number(FrameIndex frame, std::uint32_t shard) const {
  return impl_->blocks.page_number(frame, shard);
}

std::uint64_t BlockStore::page_offset(FrameIndex frame, std::uint32_t shard) const {
  return impl_->blocks.page_offset(frame, shard);
}

// ---- namespace generations and holders

SpaceId BlockStore::make_space(ShapeId shape, std::optional<SpaceId> former) {
  PEGA_ASSERT(impl_->next_space != std::numeric_limits<std::uint32_t>::max(),
              "namespace generations ran out");
  const SpaceId id{impl_->next_space++};
  impl_->spaces[id].id = id;
  impl_->spaces[id].shape = shape;
  impl_->spaces[id].former = former;
  impl_->blocks.add_space(shape);
  return id;
}

void BlockStore::retire_space(SpaceId space) {
  Space* const found = impl_->live_space(space);
  if (found == nullptr) return;
  found->is_retired = true;
  impl_->queue.emplace_back(RetireWork{space});
  bool joined = false;
  for (Work& work : impl_->queue) {
    if (auto* const sweep = std::get_if<DeadSweepWork>(&work)) {
      sweep->again = sweep->next != 0;
      joined = true;
      break;
    }
  }
  if (!joined) impl_->queue.emplace_back(DeadSweepWork{});
  impl_->do_slice();
}

HolderId BlockStore::add_holder(std::uint32_t instance, Id128 process) {
  const HolderId id{impl_->next_holder++};
  Holder& holder = impl_->holders[id];
  holder.id = id;
  holder.instance = instance;
  holder.writer_tag = writer_tag(process);
  ++impl_->instances[instance].holders;
  return id;
}

void BlockStore::set_shard(HolderId holder, std::uint32_t shard, std::uint32_t shards) {
  Holder* const found = impl_->active_holder(holder);
  if (found == nullptr) return;
  PEGA_ASSERT(shard < shards && !may_touch(holder), "shard {} of {} for a holder with jobs", shard,
              shards);
  found->shard = shard;
  found->shards = shards;
  if (shards > 1) found->writer_tag = writer_tag(Id128{~std::uint64_t{0}, found->instance});
}

void BlockStore::holder_lost(HolderId holder) {
  Holder* const found = impl_->active_holder(holder);
  if (found == nullptr) return;
  found->is_lost = true;
  impl_->lost_pinned_blocks += found->pinned_blocks;
  impl_->queue.emplace_back(LeaveWork{holder});
  impl_->do_slice();
}

bool BlockStore::may_touch(HolderId holder) const {
  const Holder* const found = impl_->known_holder(holder);
  return found != nullptr && !(found->pins.is_empty() && found->writing == 0);
}

void BlockStore::holder_gone(HolderId holder) {
  Holder* const found = impl_->known_holder(holder);
  if (found == nullptr) return;
  found->is_gone = true;
  impl_->queue.emplace_back(LeaveWork{holder});
  impl_->do_slice();
}

Space* BlockStore::Impl::live_space(SpaceId id) {
  const auto found = spaces.find(id);
  return found != spaces.end() && !found->second.is_retired ? &found->second : nullptr;
}

bool BlockStore::Impl::is_live(SpaceId id) const {
  const auto found = spaces.find(id);
  return found != spaces.end() && !found->second.is_retired;
}

Holder* BlockStore::Impl::known_holder(HolderId id) {
  const auto found = holders.find(id);
  return found != holders.end() && !found->second.is_gone ? &found->second : nullptr;
}

Holder* BlockStore::Impl::active_holder(HolderId id) {
  Holder* const holder = known_holder(id);
  return holder != nullptr && !holder->is_lost ? holder : nullptr;
}

void BlockStore::Impl::forget_instance_if_unused(std::uint32_t instance) {
  const auto found = instances.find(instance);
  if (found->second.holders == 0 && found->second.held_bytes == 0) instances.erase(found);
}

// ---- statistics

bool BlockStore::is_idle() const {
  return impl_->blocks.written_count() == 0 && impl_->blocks.held_count() == 0;
}

BlockStore::Stats BlockStore::stats() const {
  Stats stats = impl_->counted;
  stats.eviction = impl_->options.eviction;
  stats.pool_bytes = impl_->options.pool_bytes;
  stats.sealed_bytes = impl_->blocks.sealed_bytes();
  stats.written_bytes = impl_->blocks.written_bytes();
  stats.used_bytes = stats.sealed_bytes + stats.written_bytes;
  const BlockTable::Fetched& coming = impl_->blocks.fetched(FetchState::kInFlight);
  stats.fetch_bytes = impl_->blocks.fetched_bytes();
  stats.quarantined_bytes = impl_->jobs.bytes(Job::Fate::kForgotten) +
                            impl_->jobs.bytes(Job::Fate::kWriterLost) + stats.fetch_bytes -
                            coming.bytes;
  stats.held_bytes = impl_->blocks.held_bytes();
  stats.units = impl_->blocks.extents().unit_count();
  stats.free_units = impl_->blocks.extents().free_units();
  stats.unit_steps = impl_->blocks.extents().visited();
  stats.extents_taken = impl_->blocks.exchanged_extents();
  stats.reserved = impl_->jobs.frames(Job::Fate::kLive) + impl_->jobs.frames(Job::Fate::kEnded);
  stats.sealed = impl_->blocks.sealed_count();
  stats.quarantined_timeout = impl_->jobs.frames(Job::Fate::kForgotten);
  stats.quarantined_writer_lost = impl_->jobs.frames(Job::Fate::kWriterLost);
  stats.pinned_by_lost_readers = impl_->lost_pinned_blocks;
  stats.in_flight = coming.frames;
  stats.replicas = impl_->blocks.replica_count();
  stats.quarantined_fetch = impl_->blocks.fetched(FetchState::kGivenUp).frames +
                            impl_->blocks.fetched(FetchState::kQuiesced).frames;
  stats.leases = impl_->leases.size();
  stats.lent = impl_->leases.blocks();
  stats.lent_bytes = impl_->leases.bytes();
  if (impl_->leases.oldest() != LeaseTable::kNone) {
    stats.oldest_lease = impl_->leases[impl_->leases.oldest()].made;
  }
  stats.held = impl_->blocks.held_count();
  stats.claims = impl_->claims.size();
  stats.pins = impl_->pins.size();
  stats.reservations = impl_->jobs.live_count();
  if (impl_->pins.oldest() != PinTable::kNone) {
    stats.oldest_pin = impl_->pins[impl_->pins.oldest()].opened;
  }
  return stats;
}

std::vector<BlockStore::ShapeStats> BlockStore::shapes() const {
  std::vector<ShapeStats> list;
  for (const BlockTable::ShapeInfo& info : impl_->blocks.shapes()) {
    list.push_back({.shape = *info.shape,
                    .frame_bytes = info.frame_bytes,
                    .extents = info.extents,
                    .frames = info.frames,
                    .used = info.used});
  }
  return list;
}

std::uint64_t BlockStore::memory_bytes() const {
  const std::uint64_t listed = impl_->listed_blocks + impl_->blocks.written_count();
  return impl_->blocks.memory_bytes() + impl_->claims.memory_bytes() + impl_->pins.memory_bytes() +
         impl_->jobs.memory_bytes() + impl_->leases.memory_bytes() + impl_->losses.memory_bytes() +
         listed * sizeof(FrameIndex) + impl_->queue.size() * sizeof(Work) +
         (impl_->journal ? impl_->journal->memory_bytes() : 0);
}

std::optional<FrameIndex> BlockStore::recent_frame(std::size_t n) const {
  const FrameIndex frame = impl_->blocks.recent_evictable(n);
  if (frame == kNoFrame) return std::nullopt;
  return frame;
}

}  // namespace pegaflow::engine
