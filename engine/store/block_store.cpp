#include "engine/block_store.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "base/assert.h"
#include "engine/store/check.h"
#include "engine/store/fetcher.h"
#include "engine/store/leases.h"
#include "engine/store/reader.h"
#include "engine/store/reclaimer.h"
#include "engine/store/resident_blocks.h"
#include "engine/store/validate_options.h"
#include "engine/store/writer.h"

namespace pegaflow::engine {

/// The tables of rights, the blocks, and the collaborators that implement the calls. A member uses
/// those before it, and none after it.
struct BlockStore::Impl {
  Impl(const Options& given, const Clock& its_clock, ClaimTable claim_table, PinTable pin_table,
       JobTable job_table, BlockTable block_table, LostBlocks losses)
      : options(given),
        clock(its_clock),
        holders(static_cast<std::uint64_t>(static_cast<double>(given.pool_bytes) *
                                           given.instance_share)),
        claims(std::move(claim_table)),
        pins(std::move(pin_table)),
        jobs(std::move(job_table)),
        blocks(options, its_clock, spaces, std::move(block_table), std::move(losses)),
        reclaimer(options, clock, blocks, holders, spaces, claims, pins, jobs),
        reader(clock, blocks, holders, spaces, claims, pins, jobs, reclaimer),
        writer(options, clock, blocks, holders, spaces, jobs, reclaimer),
        fetcher(options, blocks, holders, spaces, jobs, reader, reclaimer),
        leases(options, clock, blocks, spaces, reclaimer) {}

  const Options options;
  const Clock& clock;

  HolderTable holders;
  SpaceTable spaces;
  ClaimTable claims;
  PinTable pins;
  JobTable jobs;

  ResidentBlocks blocks;
  Reclaimer reclaimer;
  Reader reader;
  Writer writer;
  Fetcher fetcher;
  Leases leases;
};

Result<std::unique_ptr<BlockStore>> BlockStore::create(const Options& options, const Clock& clock) {
  PEGA_TRY(validate_options(options));
  PEGA_TRY_LET(auto blocks, BlockTable::create({.pool_bytes = options.pool_bytes,
                                                .numa_nodes = options.numa_nodes,
                                                .eviction = options.eviction,
                                                .kept = options.kept}));
  PEGA_TRY_LET(auto claims, ClaimTable::create(options.max_claims));
  PEGA_TRY_LET(auto pins, PinTable::create(options.max_pins));
  PEGA_TRY_LET(auto jobs, JobTable::create(options.max_reservations));
  PEGA_TRY_LET(auto lost, LostBlocks::create(options.remembered_losses));
  return std::unique_ptr<BlockStore>(
      new BlockStore(std::make_unique<Impl>(options, clock, std::move(claims), std::move(pins),
                                            std::move(jobs), std::move(blocks), std::move(lost))));
}

BlockStore::BlockStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BlockStore::~BlockStore() = default;

// ---- the blocks of a former process

Result<BlockStore::Adopted> BlockStore::adopt(std::span<const FormerShape> shapes,
                                              std::span<const FormerSpace> spaces) {
  for (const FormerShape& each : shapes) {
    PEGA_TRY(impl_->blocks.restore_shape(each.number, each.shape));
    impl_->reclaimer.touch(ShapeId{each.number});
  }
  for (const FormerSpace& each : spaces) {
    const ShapeId shape{each.shape};
    const BlockTable& table = impl_->blocks.table();
    if (each.shape >= table.shape_count() || !table.has_shape(shape) ||
        !impl_->spaces.restore(each.id, shape)) {
      return fail(Errc::kCorrupt, "generation {} of the kept pool, of shape {}, cannot be restored",
                  static_cast<std::uint32_t>(each.id), each.shape);
    }
    impl_->blocks.add_space(shape);
  }
  PEGA_TRY_LET(const BlockTable::Adopted rows,
               impl_->blocks.adopt([&](ShapeId shape, SpaceId space) {
                 const Space* const live = impl_->spaces.live(space);
                 return live != nullptr && live->shape == shape;
               }));
  Adopted adopted{.former = std::nullopt,
                  .held = rows.held.size(),
                  .blocks = rows.blocks,
                  .bytes = rows.bytes,
                  .discarded = rows.discarded};
  if (rows.held.empty()) return adopted;
  // One pin of a holder that is lost: what ends those of a detached client ends it too.
  const HolderId former = impl_->holders.add(~std::uint32_t{0}, Id128{});
  Holder& holder = *impl_->holders.find(former);
  Pin pin;
  pin.holder = &holder;
  pin.count = static_cast<std::uint32_t>(rows.held.size());
  pin.instance = holder.instance;
  pin.opened = impl_->clock.now();
  pin.blocks = FrameList(rows.held);
  impl_->pins.add(std::move(pin));
  impl_->holders.set_lost(holder);
  impl_->pins.holder_lost(holder);
  adopted.former = former;
  return adopted;
}

// ---- shapes

Result<ShapeId> BlockStore::add_shape(const Shape& shape) {
  PEGA_TRY_LET(const BlockTable::Added added, impl_->blocks.add_shape(shape));
  if (added.is_new) impl_->reclaimer.touch(added.id);
  return added.id;
}

void BlockStore::leave_shape(ShapeId shape) { impl_->blocks.leave_shape(shape); }

bool BlockStore::has_blocks(ShapeId shape) const {
  return impl_->blocks.table().has_extents(shape);
}

std::uint64_t BlockStore::emptied_shapes() const { return impl_->blocks.table().emptied_shapes(); }

std::uint64_t BlockStore::page_bytes(FrameIndex frame, std::uint32_t shard) const {
  const BlockTable& table = impl_->blocks.table();
  return table.shape(table.shape_of(frame)).shards[shard].page_bytes;
}

std::uint32_t BlockStore::page_number(FrameIndex frame, std::uint32_t shard) const {
  return impl_->blocks.table().page_number(frame, shard);
}

std::uint64_t BlockStore::page_offset(FrameIndex frame, std::uint32_t shard) const {
  return impl_->blocks.table().page_offset(frame, shard);
}

// ---- namespace generations and holders

SpaceId BlockStore::make_space(ShapeId shape, std::optional<SpaceId> former) {
  const SpaceId id = impl_->spaces.add(shape, former);
  impl_->blocks.add_space(shape);
  return id;
}

void BlockStore::retire_space(SpaceId space) {
  Space* const found = impl_->spaces.live(space);
  if (found == nullptr) return;
  impl_->spaces.retire(*found);
  impl_->reclaimer.retire(space);
  impl_->reclaimer.do_slice();
  impl_->blocks.wake_readers();
}

HolderId BlockStore::add_holder(std::uint32_t instance, Id128 process) {
  return impl_->holders.add(instance, process);
}

void BlockStore::set_shard(HolderId holder, std::uint32_t shard, std::uint32_t shards) {
  Holder* const found = impl_->holders.active(holder);
  if (found == nullptr) return;
  PEGA_ASSERT(shard < shards && !may_touch(holder), "shard {} of {} for a holder with jobs", shard,
              shards);
  impl_->holders.set_shard(*found, shard, shards);
}

void BlockStore::holder_lost(HolderId holder) {
  Holder* const found = impl_->holders.active(holder);
  if (found == nullptr) return;
  impl_->holders.set_lost(*found);
  impl_->pins.holder_lost(*found);
  impl_->reclaimer.leave(holder);
  impl_->reclaimer.do_slice();
}

bool BlockStore::may_touch(HolderId holder) const {
  const Holder* const found = impl_->holders.known(holder);
  return found != nullptr && !(found->pins.is_empty() && found->writing == 0);
}

void BlockStore::holder_gone(HolderId holder) {
  Holder* const found = impl_->holders.known(holder);
  if (found == nullptr) return;
  impl_->holders.set_gone(*found);
  impl_->reclaimer.leave(holder);
  impl_->reclaimer.do_slice();
}

// ---- reading

std::size_t BlockStore::lookup(SpaceId space, std::span<const BlockKey> keys) const {
  return impl_->reader.lookup(space, keys);
}

std::size_t BlockStore::present(SpaceId space, std::span<const BlockKey> keys) const {
  return impl_->reader.present(space, keys);
}

std::uint64_t BlockStore::present_each(SpaceId space, std::span<const BlockKey> keys) const {
  return impl_->reader.present_each(space, keys);
}

std::uint64_t BlockStore::held_each(SpaceId space, std::span<const BlockKey> keys) const {
  return impl_->reader.held_each(space, keys);
}

void BlockStore::note_lookup(SpaceId space, std::span<const BlockKey> keys, std::size_t found,
                             std::size_t elsewhere) {
  impl_->reader.note_lookup(space, keys, found, elsewhere);
}

void BlockStore::note_lost(SpaceId space, const BlockKey& key, Miss why) {
  impl_->blocks.remember_loss(space, key, why);
}

Result<std::size_t> BlockStore::claim(HolderId holder, SpaceId space,
                                      std::span<const BlockKey> keys, const Id128& token) {
  return impl_->reader.claim(holder, space, keys, token);
}

Result<std::size_t> BlockStore::claim_more(HolderId holder, const Id128& token,
                                           std::span<const BlockKey> keys) {
  return impl_->reader.claim_more(holder, token, keys);
}

Result<bool> BlockStore::claim_together(HolderId holder, std::span<const ClaimPart> parts) {
  return impl_->reader.claim_together(holder, parts);
}

Result<void> BlockStore::join_claims(HolderId holder, std::span<const Id128> tokens) {
  return impl_->reader.join_claims(holder, tokens);
}

BlockStore::ClaimRoom BlockStore::room_to_claim(HolderId holder) const {
  return impl_->reader.room_to_claim(holder);
}

std::uint64_t BlockStore::frame_bytes(SpaceId space) const {
  return impl_->reader.frame_bytes(space);
}

void BlockStore::unclaim(HolderId holder, const Id128& token) {
  impl_->reader.unclaim(holder, token);
}

Result<BlockStore::OpenedPages> BlockStore::open(HolderId holder, const Id128& token,
                                                 std::size_t first, std::size_t count, PinId pin,
                                                 std::size_t limit) {
  return impl_->reader.open(holder, token, first, count, pin, limit);
}

std::optional<SpaceId> BlockStore::space_of_claim(const Id128& token) const {
  return impl_->reader.space_of_claim(token);
}

void BlockStore::release(HolderId holder, PinId pin) { impl_->reader.release(holder, pin); }

Result<bool> BlockStore::invalidate(HolderId holder, PinId pin, std::size_t place) {
  return impl_->reader.invalidate(holder, pin, place);
}

// ---- fetching

Result<BlockStore::Fetch> BlockStore::fetch(HolderId holder, SpaceId space, const Id128& token,
                                            std::size_t first, std::span<const BlockKey> keys,
                                            std::size_t fetchable, Evicts evicts) {
  return impl_->fetcher.fetch(holder, space, token, first, keys, fetchable, evicts);
}

bool BlockStore::has_room_to_fetch(HolderId holder, std::span<const ClaimPart> parts) const {
  return impl_->fetcher.has_room_to_fetch(holder, parts);
}

bool BlockStore::fetched(FrameIndex frame) { return impl_->fetcher.fetched(frame); }
bool BlockStore::invalidate(FrameIndex frame) {
  return resident(frame) && impl_->blocks.invalidate(frame);
}

bool BlockStore::restored(FrameIndex frame, const ssd::Proven& proven) {
  return impl_->fetcher.restored(frame, proven);
}
bool BlockStore::staged(FrameIndex frame, const ssd::Proven& proven) {
  return impl_->fetcher.staged(frame, proven);
}

void BlockStore::give_up(FrameIndex frame) { impl_->fetcher.give_up(frame); }

void BlockStore::quiesced(FrameIndex frame) { impl_->fetcher.quiesced(frame); }

bool BlockStore::is_awaited(FrameIndex frame) const { return impl_->fetcher.is_awaited(frame); }

Result<std::size_t> BlockStore::arrived(const Id128& token, std::size_t first,
                                        std::size_t count) const {
  return impl_->reader.arrived(token, first, count);
}

std::optional<FrameIndex> BlockStore::claimed_frame(const Id128& token, std::size_t place) const {
  return impl_->reader.claimed_frame(token, place);
}

// ---- lending

Result<BlockStore::Lent> BlockStore::lend(SpaceId space, std::span<const BlockKey> keys,
                                          Duration time) {
  return impl_->leases.lend(space, keys, time);
}

void BlockStore::end_lease(LeaseId lease) { impl_->leases.end_lease(lease); }

bool BlockStore::is_lent(LeaseId lease) const { return impl_->leases.is_lent(lease); }

// ---- writing

Result<std::vector<FrameIndex>> BlockStore::reserve(HolderId holder, SpaceId space,
                                                    const JobId& job, std::size_t first,
                                                    std::span<const BlockKey> keys, NoRoom no_room,
                                                    std::span<const std::uint8_t> depths,
                                                    MayRefuse may_refuse) {
  return impl_->writer.reserve(holder, space, job, first, keys, no_room, depths, may_refuse);
}

std::span<const FrameIndex> BlockStore::frames_of(HolderId holder, const JobId& job) const {
  return impl_->writer.frames_of(holder, job);
}

std::optional<SpaceId> BlockStore::space_of_job(const JobId& job) const {
  return impl_->writer.space_of_job(job);
}

Result<std::size_t> BlockStore::publish(HolderId holder, const JobId& job, std::size_t limit) {
  return impl_->writer.publish(holder, job, limit);
}

void BlockStore::abandon(HolderId holder, const JobId& job) { impl_->writer.abandon(holder, job); }

bool BlockStore::is_saving(const JobId& job) const { return impl_->writer.is_saving(job); }

// ---- the journal

Result<void> BlockStore::keep_journal() { return impl_->blocks.keep_journal(); }

BlockStore::JournalPart BlockStore::journal(SpaceId space, std::uint64_t from,
                                            std::size_t limit) const {
  return impl_->blocks.journal(std::span(&space, 1), from, limit);
}

BlockStore::JournalPart BlockStore::journal(std::span<const SpaceId> spaces, std::uint64_t from,
                                            std::size_t limit) const {
  return impl_->blocks.journal(spaces, from, limit);
}

std::uint64_t BlockStore::journal_end() const {
  return impl_->blocks.journal({}, kJournalEnd, 0).next;
}

void BlockStore::on_next_entry(std::function<void()> wake) {
  impl_->blocks.on_next_entry(std::move(wake));
}

BlockStore::Listed BlockStore::list(SpaceId space, FrameIndex from, std::size_t limit) const {
  const BlockTable& table = impl_->blocks.table();
  Listed listed;
  FrameIndex frame = table.next_touched(from);
  for (std::size_t visited = 0; frame != kNoFrame && visited < limit; ++visited) {
    const Block& block = table[frame];
    const bool is_findable = block.space == space && block.indexed && table.is_readable(frame);
    if (is_findable) {
      listed.keys.push_back(block.key);
      listed.depths.push_back(static_cast<Depth>(block.depth));
    }
    frame = table.next_touched(frame + 1);
  }
  listed.next = frame;
  return listed;
}

// ---- time and background work

void BlockStore::expire() {
  impl_->leases.expire();
  impl_->writer.expire();
}

std::optional<TimePoint> BlockStore::next_deadline() const {
  const std::optional<TimePoint> job = impl_->writer.next_deadline();
  const std::optional<TimePoint> lease = impl_->leases.next_deadline();
  return job && lease ? std::min(*job, *lease) : job ? job : lease;
}

bool BlockStore::work() {
  impl_->reclaimer.do_slice();
  return has_work();
}

bool BlockStore::has_work() const { return impl_->reclaimer.has_work(); }

void BlockStore::start_cleanup() {
  impl_->reclaimer.start_cleanup();
  impl_->reclaimer.do_slice();
}

const BlockStore::Cleanup& BlockStore::cleanup() const { return impl_->reclaimer.cleanup(); }

// ---- statistics

bool BlockStore::is_idle() const {
  const BlockTable& table = impl_->blocks.table();
  return table.written_count() == 0 && table.held_count() == 0;
}

BlockStore::Stats BlockStore::stats() const {
  Stats stats;
  stats.eviction = impl_->options.eviction;
  stats.pool_bytes = impl_->options.pool_bytes;
  impl_->blocks.report(stats);
  impl_->reclaimer.report(stats);
  impl_->reader.report(stats);
  impl_->writer.report(stats);
  impl_->fetcher.report(stats);
  impl_->leases.report(stats);
  return stats;
}

std::optional<std::uint32_t> BlockStore::next_victim_idle_s() const {
  return impl_->blocks.next_victim_idle_s();
}

std::vector<BlockStore::ShapeStats> BlockStore::shapes() const {
  std::vector<ShapeStats> list;
  for (const BlockTable::ShapeInfo& info : impl_->blocks.table().shapes()) {
    list.push_back({.number = info.number,
                    .shape = *info.shape,
                    .frame_bytes = info.frame_bytes,
                    .extents = info.extents,
                    .frames = info.frames,
                    .used = info.used});
  }
  return list;
}

std::uint64_t BlockStore::memory_bytes() const {
  return impl_->blocks.memory_bytes() + impl_->claims.memory_bytes() + impl_->pins.memory_bytes() +
         impl_->jobs.memory_bytes() + impl_->leases.table().memory_bytes() +
         impl_->reclaimer.memory_bytes();
}

void BlockStore::set_listener(BlockListener* listener) { impl_->blocks.set_listener(listener); }

std::optional<BlockStore::Resident> BlockStore::resident(FrameIndex frame) const {
  const Block& block = impl_->blocks[frame];
  if (block.state != FrameState::kSealed || !block.indexed) return std::nullopt;
  return Resident{.space = block.space,
                  .key = block.key,
                  .shape = impl_->blocks.table().shape_of(frame),
                  .is_replica = block.owner == kReplica,
                  .was_used = block.used != 0 || block.owner == kRestored,
                  .came_back = block.note > 1,
                  .depth = static_cast<Depth>(block.depth)};
}

void BlockStore::next_victims(std::uint64_t bytes, std::size_t most,
                              std::vector<FrameIndex>& frames) const {
  const BlockTable& table = impl_->blocks.table();
  const std::uint64_t free_units =
      std::uint64_t{table.extents().free_units()} * table.extents().unit_bytes();
  for (std::uint32_t shape = 0; shape < table.shape_count(); ++shape) {
    if (!table.has_shape(ShapeId{shape})) continue;
    const BlockTable::Room room = table.room_of(ShapeId{shape});
    const std::uint64_t free = free_units + room.free_frames * room.frame_bytes;
    if (free >= bytes) continue;
    const std::uint64_t count = (bytes - free + room.frame_bytes - 1) / room.frame_bytes;
    table.next_victims(ShapeId{shape}, std::min<std::uint64_t>(count, most), frames);
  }
}

std::vector<FrameIndex> BlockStore::residents() const {
  return impl_->blocks.table().sealed_by_age();
}

std::optional<FrameIndex> BlockStore::recent_frame(std::size_t n) const {
  const FrameIndex frame = impl_->blocks.table().recent_evictable(n);
  if (frame == kNoFrame) return std::nullopt;
  return frame;
}

Result<void> BlockStore::check() const {
  PEGA_TRY(impl_->blocks.table().check());
  const StoreCheck check({.holders = impl_->holders,
                          .claims = impl_->claims,
                          .pins = impl_->pins,
                          .jobs = impl_->jobs,
                          .leases = impl_->leases.table(),
                          .blocks = impl_->blocks,
                          .queue = impl_->reclaimer.queue()});
  PEGA_TRY(check.run());
  const Stats counted = stats();
  const std::uint64_t told =
      std::accumulate(counted.misses.begin(), counted.misses.end(), std::uint64_t{0});
  if (told != counted.lookup_misses) {
    return fail(Errc::kInternal, "{} misses have a reason, {} are counted", told,
                counted.lookup_misses);
  }
  return {};
}

}  // namespace pegaflow::engine
