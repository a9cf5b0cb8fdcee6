#pragma once
/// \file
/// The implementation of BlockStore; only engine/store/*.cpp include it.
///
/// block_store.cpp  construction, namespace generations and holders, statistics
/// read.cpp         lookup, claim, open, release
/// reserve.cpp      reserve, and the ways to make room
/// write.cpp        publish, abandon, timeouts
/// fetch.cpp        fetch, and how a fetch ends
/// lend.cpp         lend, and how leases end
/// work.cpp         the queued work, which returns blocks and frames in slices
/// lost.cpp         why blocks are missing, and how long they lived
/// journal.cpp      which blocks were added and removed, for subscribers
/// check.cpp        every invariant

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/block_store.h"
#include "engine/frames/block_table.h"
#include "engine/frames/victims_ahead.h"
#include "engine/store/claim_table.h"
#include "engine/store/job_table.h"
#include "engine/store/lease_table.h"
#include "engine/store/pin_table.h"
#include "engine/store/store_rows.h"
#include "engine/store/work_queue.h"
#include "engine/tables/journal.h"
#include "engine/tables/key_hash.h"

namespace pegaflow::engine {

struct BlockStore::Impl {
  Impl(const Options& given, const Clock& time, BlockTable block_table, ClaimTable claim_table,
       PinTable pin_table, JobTable job_table, LostBlocks lost_blocks)
      : options(given),
        clock(time),
        blocks(std::move(block_table)),
        claims(std::move(claim_table)),
        pins(std::move(pin_table)),
        jobs(std::move(job_table)),
        leases(given.max_leases),
        losses(std::move(lost_blocks)),
        made(time.now()) {
    const auto pool = static_cast<double>(given.pool_bytes);
    instance_limit = static_cast<std::uint64_t>(pool * given.instance_share);
    server_limit = static_cast<std::uint64_t>(pool * given.server_share);
    fetch_limit = static_cast<std::uint64_t>(pool * given.fetch_share);
    busy_limit = given.pool_bytes - static_cast<std::uint64_t>(pool * given.save_reserve);
    lend_limit = static_cast<std::uint64_t>(pool * given.lend_share);
  }

  // ---- holders and generations
  [[nodiscard]] Space* live_space(SpaceId id);
  [[nodiscard]] bool is_live(SpaceId id) const;
  /// The holder if it is still connected; null if it is unknown, lost or gone.
  [[nodiscard]] Holder* active_holder(HolderId id);
  /// The holder unless it is unknown or gone. A lost one may still report the end of its copies.
  [[nodiscard]] Holder* known_holder(HolderId id);
  void forget_instance_if_unused(std::uint32_t instance);

  // ---- claims and pins
  [[nodiscard]] std::uint64_t room_for_claim(const Holder& holder) const;
  /// Whether `server_share` allows holding this block, or, for kNoFrame, a block that is not held
  /// yet.
  [[nodiscard]] bool may_hold(const Space& space, FrameIndex frame) const;
  struct HeldPrefix {
    std::vector<FrameIndex> frames;
    bool is_shortened = false;  ///< `room` or the server's share cut the prefix.
  };
  /// Holds the longest sealed prefix of `keys` within the server's share, up to `room` blocks.
  HeldPrefix hold_prefix(const Space& space, std::span<const BlockKey> keys, std::uint64_t room);
  /// The row of a claim that may be opened, or kNone.
  [[nodiscard]] std::uint32_t openable(const Id128& token) const;
  /// Blocks `first` to `first + count` of the claim. Errors: kInvalidArgument.
  static Result<std::span<const FrameIndex>> range_of(const Claim& claim, std::size_t first,
                                                      std::size_t count);
  /// Whether the claimed block is sealed and was not invalidated.
  [[nodiscard]] bool is_openable(FrameIndex frame) const {
    return blocks[frame].state == FrameState::kSealed && blocks[frame].indexed;
  }
  /// Adds a pin to each of these claimed blocks, or to none of them if one cannot be opened.
  /// Errors: kBusy when that block is in flight, else kGone.
  Result<void> hold_again(std::span<const FrameIndex> frames);
  /// Adds held blocks to the claim in `row`; creates a claim if `row` is kNone.
  void extend_claim(std::uint32_t row, Holder& owner, Space& space, const Id128& token,
                    std::span<const FrameIndex> frames);
  void end_claim(std::uint32_t row);
  /// Ends a pin. A few blocks are returned at once, and step_cost is their number; the blocks of a
  /// larger pin are queued.
  void end_pin(std::uint32_t row);
  [[nodiscard]] OpenedPages pages_of(std::span<const FrameIndex> frames,
                                     std::uint32_t writer_tag) const;

  // ---- fetches and leases
  /// The row of the claim of `first` blocks that fetch() may extend; kNone if there is no claim
  /// under this token yet.
  Result<std::uint32_t> extensible(const Holder& owner, SpaceId space, const Id128& token,
                                   std::size_t first) const;
  [[nodiscard]] bool is_being_saved(FrameIndex frame) const;
  /// Takes a frame to fetch this block into. `present` is the frame that the index has for the key,
  /// or kNoFrame: see move_key(). Returns kNoFrame when limits or room do not allow a fetch.
  FrameIndex bring(const Space& space, const BlockKey& key, FrameIndex present,
                   std::uint32_t& steps);
  void end_lease(std::uint32_t row);
  void expire_leases();

  // ---- reasons of misses, for metrics
  /// Updates `second`. Called once for each call or slice, because reading the clock costs as much
  /// as handling a block.
  void read_clock();
  /// Frees an evictable block, counts it, and records the reason: `why`, or kReset if its
  /// generation is retired.
  void drop(FrameIndex frame, Miss why, bool is_victim = false);
  /// Prefetches the memory other than its row that drop() of a block will touch. Call it once the
  /// row itself is in the cache.
  void prefetch_drop(FrameIndex frame) const;
  /// Counts the reasons why the keys from the first miss of a lookup on were not found.
  void count_misses(const Space& space, std::span<const BlockKey> missing);
  [[nodiscard]] Miss why_missing(const Space& space, const BlockKey& key, FrameIndex frame) const;

  // ---- the journal
  /// Records that the block of this frame is present, or is about to be removed.
  void note(FrameIndex frame, bool is_present) noexcept {
    if (journal) journal->add(blocks[frame].space, blocks[frame].key, is_present);
  }

  // ---- reservations
  /// False when a writer of the job has left, or its generation was retired, even if the queued
  /// work has not reached the job yet.
  [[nodiscard]] bool may_publish(const Job& job) const;
  void forget_job(std::uint32_t row);
  /// The copies of `shard` into a forgotten job have ended, or never began.
  void end_shard(std::uint32_t row, std::uint32_t shard);
  /// If no shard writes to the frames of a forgotten job any longer, queues them to be freed.
  void end_job_if_over(std::uint32_t row);
  /// The row of `job`, for which `writer` may reserve frames; kNone if the job does not exist yet.
  Result<std::uint32_t> reservable(Holder& writer, const Space& where, const JobId& job) const;
  /// The result of reserve() for one key: a frame, or kNoFrame to skip it. No value with
  /// NoRoom::kStop when room for it is still being made. `add_job` creates the job's row if there
  /// is none.
  template <typename AddJob>
  std::optional<FrameIndex> decide(const Space& space, const BlockKey& key, FrameIndex present,
                                   std::uint32_t& steps, NoRoom no_room, AddJob&& add_job);
  enum class Room : std::uint8_t {
    kThere,
    kLater,  ///< An exchange of extents for this shape is in progress.
    kNone,
  };
  /// Makes the key of `present` free for another frame: evicts a sealed block, whose extent is
  /// leaving, or removes a block that will never be sealed from the index.
  void move_key(FrameIndex present);
  enum class MayRevoke : bool { kNo, kYes };
  /// Makes sure that there is a free frame of `shape`, by eviction or an exchange of extents if
  /// necessary. Does at most `steps` steps of queued work, and subtracts them. Revokes claims only
  /// if `may_revoke` allows it.
  Room make_room(ShapeId shape, std::uint32_t& steps, MayRevoke may_revoke);

  // ---- queued work (work.cpp)
  void do_slice();
  /// Does one step of the oldest queued work, for one block, row or frame, and removes work that is
  /// finished. Returns false when nothing is queued.
  bool do_step();
  // One step of each kind of work; returns false when that work is finished.
  bool step(GiveBackWork& work);
  bool step(FreeJobWork& work);
  bool step(LeaveWork& work);
  bool step(RetireWork& work);
  bool step(DeadSweepWork& work);
  bool step(CleanupWork& work);
  bool step(LeavingWork& work);
  bool step(TouchWork& work);
  bool step(ForgetShapeWork& work);
  /// Ends one hold of a claim, pin or lease on the block. After the last one, frees a block that
  /// lookups cannot find: invalidated, of a retired generation, or not fetched successfully.
  void give_back(FrameIndex frame);
  /// Removes the last block of the list and ends a hold on it.
  void give_back_last(FrameList& frames);
  void prefetch_sweep(FrameIndex frame) const;

  // ---- invariants (check.cpp)
  [[nodiscard]] Result<void> check_holds() const;
  [[nodiscard]] Result<void> check_jobs() const;
  [[nodiscard]] Result<void> check_shares() const;
  [[nodiscard]] Result<void> check_leases() const;

  Options options;
  const Clock& clock;
  BlockTable blocks;
  ClaimTable claims;
  PinTable pins;
  JobTable jobs;
  LeaseTable leases;
  LostBlocks losses;
  std::optional<Journal> journal;  ///< No value until keep_journal() is called.
  VictimsAhead ahead;
  TimePoint made;
  std::uint32_t second = 0;  ///< Seconds since `made`, at the last read_clock().

  // Few entries, in maps whose elements do not move: rows point to them.
  std::unordered_map<HolderId, Holder> holders;
  std::unordered_map<SpaceId, Space> spaces;
  std::unordered_map<std::uint32_t, Instance> instances;
  std::uint64_t next_holder = 1;
  std::uint32_t next_space = 1;
  // Limits in bytes: the shares of Options.
  std::uint64_t instance_limit = 0;
  std::uint64_t server_limit = 0;
  std::uint64_t fetch_limit = 0;
  std::uint64_t busy_limit = 0;  ///< For BlockTable::busy_bytes(), when a fetch takes a frame.
  std::uint64_t lend_limit = 0;

  WorkQueue queue;
  std::uint32_t step_cost = 1;  ///< Cost of the last step, in blocks.
  Cleanup cleanup;
  std::uint64_t listed_blocks = 0;  ///< Entries in the lists of claims, pins, leases, queued work.
  Stats counted;                    ///< Only the counters since the start.
  std::uint64_t lost_pinned_blocks = 0;
};

}  // namespace pegaflow::engine
