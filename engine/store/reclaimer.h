#pragma once
/// \file
/// The end of rights, the work that remains after it, and room for other blocks.

#include <cstdint>
#include <optional>
#include <variant>

#include "base/clock.h"
#include "engine/block_store.h"
#include "engine/rights/claim_table.h"
#include "engine/rights/holder_table.h"
#include "engine/rights/job_table.h"
#include "engine/rights/pin_table.h"
#include "engine/rights/space_table.h"
#include "engine/store/resident_blocks.h"
#include "engine/store/work_queue.h"

namespace pegaflow::engine {

/// Owns the queue of work that remains after something ended, and is the only one that ends claims,
/// pins, jobs, holders and generations: when a caller asks for it, when the queued work reaches
/// them, and, for claims, when room is needed. Thread-bound.
class Reclaimer {
 public:
  /// All of them outlive it.
  Reclaimer(const BlockStore::Options& options, const Clock& clock, ResidentBlocks& blocks,
            HolderTable& holders, SpaceTable& spaces, ClaimTable& claims, PinTable& pins,
            JobTable& jobs)
      : options_(options),
        clock_(clock),
        blocks_(blocks),
        holders_(holders),
        spaces_(spaces),
        claims_(claims),
        pins_(pins),
        jobs_(jobs) {}

  // ---- ends; do_slice() afterwards returns the first blocks

  void end_claim(std::uint32_t row);
  /// Ends the claim and those that were made together with it.
  void end_claims_together(std::uint32_t row);
  /// A few blocks are returned at once; those of a larger pin are queued.
  void end_pin(std::uint32_t row);
  /// Queues the blocks of a list that holds them.
  void give_back(FrameList blocks) { queue_.emplace_back(GiveBackWork{std::move(blocks)}); }
  void forget_job(std::uint32_t row);
  /// The copies of `shard` into a forgotten job have ended, or never began.
  void end_shard(std::uint32_t row, std::uint32_t shard);
  /// If no shard writes to the frames of a forgotten job any longer, queues them to be freed.
  void end_job_if_over(std::uint32_t row);
  /// Queues the rows of a holder that was lost or is gone.
  void leave(HolderId holder) { queue_.emplace_back(LeaveWork{holder}); }
  /// Queues the rows and blocks of a retired generation.
  void retire(SpaceId space);
  /// Queues the memory of a new shape's tables to be allocated.
  void touch(ShapeId shape) { queue_.emplace_back(TouchWork{shape}); }
  /// Queues the eviction of all evictable blocks.
  void start_cleanup();
  [[nodiscard]] const BlockStore::Cleanup& cleanup() const noexcept { return cleanup_; }

  // ---- queued work

  /// Does `slice_blocks` steps of the queued work, or less if none is left.
  void do_slice();
  [[nodiscard]] bool has_work() const { return !queue_.empty() || blocks_.table().has_unused(); }

  // ---- room

  enum class Room : std::uint8_t {
    kThere,
    kLater,  ///< An exchange of extents for this shape is in progress.
    kNone,
    kRefused,  ///< The policy keeps its blocks rather than the new one.
  };
  enum class MayRevoke : bool { kNo, kYes };
  /// Makes sure that there is a free frame of `shape`, by eviction or an exchange of extents if
  /// necessary. Does at most `steps` steps of queued work, and subtracts them. Revokes claims only
  /// if `may_revoke` allows it.
  Room make_room(ShapeId shape, std::uint32_t& steps, MayRevoke may_revoke) {
    return make_room(shape, steps, may_revoke, nullptr);
  }
  /// The same for a new block that the policy may refuse.
  struct NewBlock {
    SpaceId space{};
    const BlockKey& key;
  };
  Room make_room(ShapeId shape, std::uint32_t& steps, MayRevoke may_revoke, const NewBlock& saved) {
    return make_room(shape, steps, may_revoke, &saved);
  }
  /// The same by the eviction of replicas of this shape alone, and without queued work.
  Room make_room_of_replicas(ShapeId shape);

  /// Adds its part of the statistics.
  void report(BlockStore::Stats& stats) const { stats.claims_revoked = claims_revoked_; }
  [[nodiscard]] std::uint64_t memory_bytes() const { return queue_.size() * sizeof(Work); }
  /// For checks.
  [[nodiscard]] const WorkQueue& queue() const noexcept { return queue_; }

 private:
  Room make_room(ShapeId shape, std::uint32_t& steps, MayRevoke may_revoke, const NewBlock* saved);
  void revoke(std::uint32_t claim);
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
  void prefetch_sweep(FrameIndex frame) const;

  const BlockStore::Options& options_;
  const Clock& clock_;
  ResidentBlocks& blocks_;
  HolderTable& holders_;
  SpaceTable& spaces_;
  ClaimTable& claims_;
  PinTable& pins_;
  JobTable& jobs_;

  WorkQueue queue_;
  std::uint32_t step_cost_ = 1;  ///< Cost of the last step, in blocks.
  BlockStore::Cleanup cleanup_;
  std::uint64_t claims_revoked_ = 0;
};

}  // namespace pegaflow::engine
