#pragma once
/// \file
/// Waits for the end of save jobs: decode engines wait for the saves of prefill engines.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "capnp/wire/codec.h"
#include "engine/block_store.h"
#include "server/cache/cache_stats.h"

namespace pegaflow::server {

/// Waits until a job of a scheduler, and all its jobs before it, are over: sealed or dropped.
///
/// Jobs of one scheduler have rising numbers and each shard requests them in that order. So a job
/// is over when every shard has requested it or a later one, and neither it nor one before it may
/// still be sealed. A shard without a page of a job's kind never requests that job, and need not:
/// then it is enough that all jobs before are known, and each was requested by its shards. An
/// earlier number that no shard has requested yet may be a job of that shard, so it delays the
/// answer until the shard requests a later one. Jobs of a scheduler that is not attached are
/// unknown, and waits for them fail.
///
/// Bounded: at most `max_waits` waits, each with a deadline. Each is answered exactly once, from
/// within the call that decides it, so an answer must not call back. Thread-bound: the RPC thread.
class JobWaits {
 public:
  using Answer = std::function<void(Result<void>)>;

  /// The longest wait, whatever the caller requests.
  static constexpr Duration kLongest = kLongestJobWait;
  /// Limit of unfinished jobs recorded for one scheduler, and of jobs that not all shards request.
  /// Beyond it the oldest counts as over, so that its callers stop waiting too early and miss the
  /// blocks that are not sealed yet.
  static constexpr std::size_t kMaxBegun = 4096;

  /// Both outlive it.
  JobWaits(const engine::BlockStore& store, const Clock& clock, std::size_t max_waits);
  /// Answers kCancelled to all waits.
  ~JobWaits();
  JobWaits(const JobWaits&) = delete;
  JobWaits& operator=(const JobWaits&) = delete;

  /// A connection that starts jobs under that name is attached; one scheduler may have two for a
  /// moment.
  void attached(const Id128& scheduler);
  /// That connection ended; with the last one the waits for the scheduler's jobs end.
  void detached(const Id128& scheduler);
  [[nodiscard]] bool is_attached(const Id128& scheduler) const;
  /// The writer of `shard` has requested slots, with any result. Long jobs request them in slices:
  /// `has_more` until the last. `requesters` tells by shard whether it requests this job at all;
  /// empty: all do. Ignores unknown schedulers.
  void begun(const JobId& job, std::uint32_t shard, std::uint32_t shards, bool has_more,
             const std::vector<bool>& requesters = {});
  /// A rank without which no job of the scheduler can be sealed has disconnected: answers kGone.
  void lost(const Id128& scheduler);

  /// Answers success once the job and those before it are over; kGone for a scheduler that is not
  /// attached, or leaves; kTimeout after `patience`; kBusy when too many wait; kCancelled when the
  /// connection ends.
  /// `is_served` is false while a rank as in lost() is disconnected: then kGone at once.
  /// kBegun: answers success once all ranks that have pages of it have requested slots for the job.
  enum class Until : bool { kOver, kBegun };
  void wait(const Id128& connection, const JobId& job, bool is_served, Duration patience,
            Answer answer, Until until = Until::kOver);
  /// All jobs of the scheduler up to this one are over, or with kBegun have begun. 0: none, or the
  /// scheduler is not attached.
  [[nodiscard]] std::uint64_t reached(const Id128& scheduler, Until until = Until::kOver);
  /// The connection ended: cancels its waits.
  void forget(const Id128& connection);

  /// Answers the waits whose jobs are over. To be called after each call that may seal or drop one.
  void settle();
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;
  /// Answers the waits whose deadline has passed.
  void expire();

  using Stats = JobWaitStats;
  [[nodiscard]] Stats stats() const;

 private:
  enum class WaitId : std::uint64_t {};
  struct Scheduler {
    std::uint32_t connections = 0;
    std::vector<std::uint64_t>
        asked{};  ///< By shard: the highest number that requested slots; 0: none.
    /// Each job up to this one was requested by all shards that have pages of it.
    std::uint64_t requested = 0;
    /// Later jobs that not all shards request, by number: those that do.
    std::map<std::uint64_t, std::vector<bool>> requesters{};
    std::set<std::uint64_t> begun{};  ///< Those of the jobs that may not be over.
    std::multimap<std::uint64_t, WaitId> waits{};
    std::multimap<std::uint64_t, WaitId> begun_waits{};  ///< Those for Until::kBegun.
    std::multimap<std::uint64_t, WaitId>& waits_for(Until until) {
      return until == Until::kBegun ? begun_waits : waits;
    }
  };
  struct Wait {
    Id128 connection;
    JobId job;
    TimePoint deadline;
    Answer answer;
    Until until = Until::kOver;
  };

  static void advance_requested(Scheduler& scheduler);
  [[nodiscard]] std::uint64_t over_up_to(const Id128& name, Scheduler& scheduler) const;
  void answer(WaitId id, Result<void> result);
  void answer_all(Scheduler& scheduler, const Error& why);
  void count(const Result<void>& result);

  const engine::BlockStore& store_;
  const Clock& clock_;
  std::size_t max_waits_;
  std::uint64_t last_id_ = 0;
  std::unordered_map<Id128, Scheduler> schedulers_;
  std::map<WaitId, Wait> waits_;
  std::set<std::pair<TimePoint, WaitId>> by_deadline_;
  Stats counted_;
};

}  // namespace pegaflow::server
