#include "engine/block_store.h"

#include <limits>
#include <memory>
#include <utility>

#include "base/assert.h"
#include "engine/block_store_impl.h"

namespace pegaflow {

namespace {

constexpr std::uint32_t kMaxSlots = std::uint32_t{1} << 31;

/// Tells the writers of blocks apart, in the 4 bytes that a block has for it. Incarnations are
/// random, so two given processes share a tag once in 2^32; it only feeds a counter.
std::uint32_t writer_tag(const Id128& process) noexcept {
  return mix_hash(process.high, process.low);
}

bool is_share(double share) noexcept { return share > 0.0 && share <= 1.0; }

Result<void> validate(const BlockStore::Options& options) {
  if (options.slot_count > kMaxSlots) {
    return fail(Errc::kInvalidArgument, "a store has up to {} slots, not {}", kMaxSlots,
                options.slot_count);
  }
  if (!is_share(options.instance_share) || !is_share(options.node_share)) {
    return fail(Errc::kInvalidArgument, "shares lie above 0 and up to 1, not {} and {}",
                options.instance_share, options.node_share);
  }
  if (options.reservation_timeout <= Duration::zero() || options.claim_grace < Duration::zero()) {
    return fail(Errc::kInvalidArgument, "a reservation needs time, and the grace is not negative");
  }
  if (options.slice_blocks == 0) return fail(Errc::kInvalidArgument, "a slice has 1 block or more");
  for (const std::uint32_t rows :
       {options.max_claims, options.max_pins, options.max_reservations}) {
    if (rows == 0 || rows > kMaxSlots) {
      return fail(Errc::kInvalidArgument, "a table has 1 to {} rows, not {}", kMaxSlots, rows);
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<BlockStore>> BlockStore::create(const Options& options, const Clock& clock) {
  PEGA_TRY(validate(options));
  PEGA_TRY_LET(auto blocks, BlockTable::create(options.slot_count, options.eviction));
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

Result<void> BlockStore::recut(std::uint32_t slot_count) {
  if (!is_at_rest()) {
    return fail(Errc::kBusy, "{} slots are being written and {} blocks held",
                impl_->blocks.written_count(), impl_->blocks.held_count());
  }
  Options options = impl_->options;
  options.slot_count = slot_count;
  PEGA_TRY(validate(options));
  PEGA_TRY_LET(auto blocks, BlockTable::create(slot_count, options.eviction));
  impl_->counted.evictions += impl_->blocks.sealed_count();
  impl_->blocks = std::move(blocks);
  impl_->options = options;
  impl_->set_limits();
  // The sweeps have nothing left to pass.
  std::erase_if(impl_->queue, [](const Work& work) {
    return std::holds_alternative<DeadSweepWork>(work) || std::holds_alternative<CleanupWork>(work);
  });
  impl_->cleanup.done = true;
  return {};
}

void BlockStore::Impl::set_limits() {
  const double slots = options.slot_count;
  instance_limit = static_cast<std::uint64_t>(slots * options.instance_share);
  node_limit = static_cast<std::uint64_t>(slots * options.node_share);
}

// ---- spaces and holders

SpaceId BlockStore::make_space(std::optional<SpaceId> former) {
  PEGA_ASSERT(impl_->next_space != std::numeric_limits<std::uint32_t>::max(), "spaces ran out");
  const SpaceId id{impl_->next_space++};
  impl_->spaces[id].id = id;
  impl_->spaces[id].former = former;
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
  return found != nullptr && !(found->pins.is_empty() && found->live_jobs.is_empty() &&
                               found->forgotten_jobs.is_empty());
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
  if (found->second.holders == 0 && found->second.held_blocks == 0) instances.erase(found);
}

// ---- statistics

bool BlockStore::is_at_rest() const {
  return impl_->blocks.written_count() == 0 && impl_->blocks.held_count() == 0;
}

BlockStore::Stats BlockStore::stats() const {
  Stats stats = impl_->counted;
  stats.free = impl_->blocks.free_count();
  stats.reserved = impl_->jobs.slots(Job::Fate::kLive) + impl_->jobs.slots(Job::Fate::kEnded);
  stats.sealed = impl_->blocks.sealed_count();
  stats.quarantined_timeout = impl_->jobs.slots(Job::Fate::kForgotten);
  stats.quarantined_writer_lost = impl_->jobs.slots(Job::Fate::kWriterLost);
  stats.pinned_by_lost_readers = impl_->lost_pinned_blocks;
  stats.held = impl_->blocks.held_count();
  stats.claims = impl_->claims.size();
  stats.pins = impl_->pins.size();
  stats.reservations = impl_->jobs.live_count();
  if (impl_->pins.oldest() != PinTable::kNone) {
    stats.oldest_pin = impl_->pins[impl_->pins.oldest()].opened;
  }
  return stats;
}

std::uint32_t BlockStore::slot_count() const { return impl_->blocks.slot_count(); }

std::uint64_t BlockStore::memory_bytes() const {
  const std::uint64_t listed = impl_->listed_blocks + impl_->blocks.written_count();
  return impl_->blocks.memory_bytes() + impl_->claims.memory_bytes() + impl_->pins.memory_bytes() +
         impl_->jobs.memory_bytes() + impl_->losses.memory_bytes() + listed * sizeof(SlotIndex) +
         impl_->queue.size() * sizeof(Work);
}

std::optional<SlotIndex> BlockStore::recent_slot(std::size_t n) const {
  const SlotIndex slot = impl_->blocks.recent_at_rest(n);
  if (slot == kNoSlot) return std::nullopt;
  return slot;
}

}  // namespace pegaflow
