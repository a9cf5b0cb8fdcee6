#pragma once
/// \file
/// Reservations: from reserve() to publish() or abandon().

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "engine/block_store.h"
#include "engine/rights/holder_table.h"
#include "engine/rights/job_table.h"
#include "engine/rights/space_table.h"
#include "engine/store/reclaimer.h"
#include "engine/store/resident_blocks.h"

namespace pegaflow::engine {

/// The calls of clients that save: they reserve frames for a job, write them and publish them.
/// Thread-bound.
///
/// Functions with the name of one of BlockStore's are its implementation.
class Writer {
 public:
  /// All of them outlive it.
  Writer(const BlockStore::Options& options, const Clock& clock, ResidentBlocks& blocks,
         HolderTable& holders, SpaceTable& spaces, JobTable& jobs, Reclaimer& reclaimer)
      : options_(options),
        clock_(clock),
        blocks_(blocks),
        holders_(holders),
        spaces_(spaces),
        jobs_(jobs),
        reclaimer_(reclaimer) {}

  Result<std::vector<FrameIndex>> reserve(HolderId holder, SpaceId space, const JobId& job,
                                          std::size_t first, std::span<const BlockKey> keys,
                                          BlockStore::NoRoom no_room,
                                          std::span<const std::uint8_t> depths,
                                          BlockStore::MayRefuse may_refuse);
  [[nodiscard]] std::span<const FrameIndex> frames_of(HolderId holder, const JobId& job) const;
  [[nodiscard]] bool is_saving(const JobId& job) const;
  [[nodiscard]] std::optional<SpaceId> space_of_job(const JobId& job) const;
  Result<std::size_t> publish(HolderId holder, const JobId& job, std::size_t limit);
  void abandon(HolderId holder, const JobId& job);

  /// Forgets reservations older than the timeout, at most `slice_blocks`.
  void expire();
  /// When expire() has something to do; no value while nothing is reserved.
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;

  /// Adds its part of the statistics.
  void report(BlockStore::Stats& stats) const;

 private:
  struct Counters {
    std::uint64_t insertions = 0;
    std::uint64_t skipped_present = 0;
    std::uint64_t skipped_no_room = 0;
    std::uint64_t skipped_refused = 0;
    std::uint64_t reservations_timed_out = 0;
    std::uint64_t late_publishes = 0;
  };

  /// The row of `job`, for which `writer` may reserve frames; kNone if the job does not exist yet.
  Result<std::uint32_t> reservable(Holder& writer, const Space& where, const JobId& job) const;
  /// Tells the eviction policy of a job's first slice.
  void begin_save(ShapeId shape, const JobId& job, BlockStore::MayRefuse may_refuse);
  /// The result of reserve() for one key: a frame, or kNoFrame to skip it. No value with
  /// NoRoom::kStop when room for it is still being made. `add_job` creates the job's row if there
  /// is none.
  template <typename AddJob>
  std::optional<FrameIndex> decide(const Space& space, const BlockKey& key, Depth depth,
                                   FrameIndex present, std::uint32_t& steps,
                                   BlockStore::NoRoom no_room, BlockStore::MayRefuse may_refuse,
                                   AddJob&& add_job);

  const BlockStore::Options& options_;
  const Clock& clock_;
  ResidentBlocks& blocks_;
  HolderTable& holders_;
  SpaceTable& spaces_;
  JobTable& jobs_;
  Reclaimer& reclaimer_;
  Counters counted_;
  JobId last_{};  ///< The job of the last call of reserve(): its slices are one save.
};

}  // namespace pegaflow::engine
