#pragma once
/// \file
/// The implementation of BlockStore; only engine/store/*.cpp include it.
///
/// block_store.cpp  construction, namespace generations and holders, statistics
/// read.cpp         lookup, claim, open, release
/// reserve.cpp      reserve, and how it finds room
/// write.cpp        publish, abandon, timeouts
/// fetch.cpp        fetch, and how a fetch ends
/// lend.cpp         lend, and how leases end
/// work.cpp         the queue of what is given back in slices
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
  /// The holder if it may still call: neither unknown nor lost nor gone.
  [[nodiscard]] Holder* active_holder(HolderId id);
  /// The holder if callers know it: lost ones may still report that their copies ended.
  [[nodiscard]] Holder* known_holder(HolderId id);
  void forget_instance_if_unused(std::uint32_t instance);

  // ---- claims and pins
  [[nodiscard]] std::uint64_t room_for_claim(const Holder& holder) const;
  /// Whether `server_share` leaves room to hold this block, or, for kNoFrame, one more.
  [[nodiscard]] bool may_hold(const Space& space, FrameIndex frame) const;
  struct HeldPrefix {
    std::vector<FrameIndex> frames;
    bool is_shortened = false;  ///< By `room` or the server's share.
  };
  /// Holds the longest sealed prefix of `keys` within the server's share, at most `room` blocks.
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
  /// Adds a pin to each of these claimed blocks; to none of them if one cannot be opened.
  /// Errors: kBusy when that one is in flight, else kGone.
  Result<void> hold_again(std::span<const FrameIndex> frames);
  /// Adds held blocks to the claim in `row`, or makes one if that is kNone.
  void extend_claim(std::uint32_t row, Holder& owner, Space& space, const Id128& token,
                    std::span<const FrameIndex> frames);
  void end_claim(std::uint32_t row);
  /// Returns a few blocks at once, which is the cost of the step that does it; queues more.
  void end_pin(std::uint32_t row);
  [[nodiscard]] OpenedPages pages_of(std::span<const FrameIndex> frames,
                                     std::uint32_t writer_tag) const;

  // ---- fetches and leases
  /// The row of the claim of `first` blocks that fetch() may extend, or kNone: make one.
  Result<std::uint32_t> extensible(const Holder& owner, SpaceId space, const Id128& token,
                                   std::size_t first) const;
  [[nodiscard]] bool is_being_saved(FrameIndex frame) const;
  /// Takes a frame into which that block, whose key leads to `present`, is fetched; kNoFrame when
  /// limits or room do not allow it.
  FrameIndex bring(const Space& space, const BlockKey& key, FrameIndex present,
                   std::uint32_t& steps);
  void end_lease(std::uint32_t row);
  void expire_leases();

  // ---- reasons of misses, for metrics
  /// Updates `second`; called once per call or slice, because reading the clock costs as much as a
  /// block.
  void read_clock();
  /// Frees an evictable block, counts it, and remembers the reason: `why`, or that its generation
  /// is retired.
  void drop(FrameIndex frame, Miss why, bool is_victim = false);
  /// Prefetches what drop() of a block will touch beside its row, once that has arrived.
  void prefetch_drop(FrameIndex frame) const;
  /// Counts the reasons why the first of `missing` and those after it were not found.
  void count_misses(const Space& space, std::span<const BlockKey> missing);
  [[nodiscard]] Miss why_missing(const Space& space, const BlockKey& key, FrameIndex frame) const;

  // ---- the journal
  /// Records that the block of this row is present, or is about to be gone.
  void note(FrameIndex frame, bool is_present) noexcept {
    if (journal) journal->add(blocks[frame].space, blocks[frame].key, is_present);
  }

  // ---- reservations
  /// False when a writer of the job has left, or its generation was retired, even if the queued
  /// work has not reached the job yet.
  [[nodiscard]] bool may_publish(const Job& job) const;
  void forget_job(std::uint32_t row);
  /// That shard's copies into a forgotten job have ended, or never began.
  void end_shard(std::uint32_t row, std::uint32_t shard);
  /// If no shard writes a forgotten job any longer, queues its remaining frames.
  void end_job_if_over(std::uint32_t row);
  /// The row of the job for which a call of `writer` may reserve, or kNone if there is none yet.
  Result<std::uint32_t> reservable(Holder& writer, const Space& where, const JobId& job) const;
  /// The result for a key: a frame or kNoFrame; no value with NoRoom::kStop when its room is not
  /// available yet. `add_job` creates the job's row if there is none.
  template <typename AddJob>
  std::optional<FrameIndex> decide(const Space& space, const BlockKey& key, FrameIndex present,
                                   std::uint32_t& steps, NoRoom no_room, AddJob&& add_job);
  enum class Room : std::uint8_t {
    kThere,
    kLater,  ///< An exchange for this shape is in progress.
    kNone,
  };
  /// Takes the key from a frame that will not be sealed, or not be found, so that it can lead to
  /// another.
  void move_key(FrameIndex present);
  enum class MayRevoke : bool { kNo, kYes };
  /// Provides a free frame, by exchange or eviction if necessary, with at most `steps` of queued
  /// work. Revokes claims only if `may_revoke` allows it.
  Room make_room(ShapeId shape, std::uint32_t& steps, MayRevoke may_revoke);

  // ---- queued work (work.cpp)
  void do_slice();
  /// Does one block, row or frame of the first work; removes finished work. Returns false when
  /// nothing is queued.
  bool do_step();
  // One step of each kind; returns false when nothing is left to do.
  bool step(GiveBackWork& work);
  bool step(FreeJobWork& work);
  bool step(LeaveWork& work);
  bool step(RetireWork& work);
  bool step(DeadSweepWork& work);
  bool step(CleanupWork& work);
  bool step(LeavingWork& work);
  bool step(TouchWork& work);
  bool step(ForgetShapeWork& work);
  /// Removes a claim, pin or lease; frees the block if that was the last and its generation is
  /// retired.
  void give_back(FrameIndex frame);
  /// The same for the last block of the list, which it removes.
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
  std::optional<Journal> journal;  ///< Once keep_journal() was called.
  VictimsAhead ahead;
  TimePoint made;
  std::uint32_t second = 0;  ///< Since `made`, at the last read_clock().

  // Few, with stable addresses: rows point to them.
  std::unordered_map<HolderId, Holder> holders;
  std::unordered_map<SpaceId, Space> spaces;
  std::unordered_map<std::uint32_t, Instance> instances;
  std::uint64_t next_holder = 1;
  std::uint32_t next_space = 1;
  std::uint64_t instance_limit = 0;  ///< Bytes.
  std::uint64_t server_limit = 0;
  std::uint64_t fetch_limit = 0;
  std::uint64_t busy_limit = 0;  ///< For frames that no eviction can free, when a fetch takes one.
  std::uint64_t lend_limit = 0;

  WorkQueue queue;
  std::uint32_t step_cost = 1;  ///< Cost of the last step, in blocks.
  Cleanup cleanup;
  std::uint64_t listed_blocks = 0;  ///< In the lists of claims, pins, leases and queued work.
  Stats counted;                    ///< The part "since the start".
  std::uint64_t lost_pinned_blocks = 0;
};

}  // namespace pegaflow::engine
