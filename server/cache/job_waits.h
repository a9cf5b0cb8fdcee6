#pragma once
/// \file
/// Who waits for which save jobs to be over: decode engines, for what a prefill engine saves.

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

namespace pegaflow::server {

/// Waits until a job of a scheduler, and all its jobs before it, are over: sealed or dropped.
///
/// Jobs of one scheduler have rising numbers and each shard asks for them in that order. So a job
/// is over when every shard has asked for it or for a later one, and neither it nor one before it
/// may still be sealed. Of a scheduler that is not attached nothing is known, and nothing waited
/// for.
///
/// Bounded: so many waits at once, each with a deadline. Each is answered exactly once, from within
/// the call that decides it, so an answer must not call back. Thread-bound: the RPC thread.
class JobWaits {
 public:
  using Answer = std::function<void(Result<void>)>;

  /// The longest that anybody may wait, whatever they ask for.
  static constexpr Duration kLongest = kLongestJobWait;
  /// Jobs of one scheduler that are remembered as begun. Beyond it the oldest counts as over, so
  /// that somebody stops waiting too early: they miss what is not sealed yet.
  static constexpr std::size_t kMaxBegun = 4096;

  /// Both outlive it.
  JobWaits(const engine::BlockStore& store, const Clock& clock, std::size_t max_waits);
  /// Answers kCancelled to those who wait.
  ~JobWaits();
  JobWaits(const JobWaits&) = delete;
  JobWaits& operator=(const JobWaits&) = delete;

  /// A connection that hands out jobs under that name; one scheduler may have two for a moment.
  void attached(const Id128& scheduler);
  /// That connection is gone; with the last of them nobody waits for the scheduler's jobs.
  void detached(const Id128& scheduler);
  [[nodiscard]] bool is_attached(const Id128& scheduler) const;
  /// The writer of `shard` has asked for slots, whatever it was told. Long jobs are asked for in
  /// slices: `has_more` until the last. Unknown schedulers are fine.
  void begun(const JobId& job, std::uint32_t shard, std::uint32_t shards, bool has_more);
  /// Somebody without whom no job of the scheduler can be sealed is gone: answers kGone.
  void lost(const Id128& scheduler);

  /// Answers success once the job and those before it are over; kGone for a scheduler that is not
  /// attached, or leaves; kTimeout after `patience`; kBusy when too many wait; kCancelled when the
  /// connection ends.
  /// `is_served` is false while such a one as in lost() is away: then kGone at once.
  void wait(const Id128& connection, const JobId& job, bool is_served, Duration patience,
            Answer answer);
  /// The connection of those who wait has ended.
  void forget(const Id128& connection);

  /// Answers those whose jobs are over by now. Call it after whatever may seal or drop one.
  void settle();
  [[nodiscard]] std::optional<TimePoint> next_deadline() const;
  /// Answers those whose deadline has passed.
  void expire();

  struct Stats {
    std::size_t waiting = 0;  ///< Now.
    // Since the start.
    std::uint64_t over = 0;
    std::uint64_t gone = 0;
    std::uint64_t timed_out = 0;
    std::uint64_t busy = 0;
    std::uint64_t cancelled = 0;
  };
  [[nodiscard]] Stats stats() const;

 private:
  enum class WaitId : std::uint64_t {};
  struct Scheduler {
    std::uint32_t connections = 0;
    std::vector<std::uint64_t> asked{};  ///< By shard: the highest number; 0: none yet.
    std::set<std::uint64_t> begun{};     ///< Of those jobs, the ones not known to be over.
    std::multimap<std::uint64_t, WaitId> waits{};
  };
  struct Wait {
    Id128 connection;
    JobId job;
    TimePoint deadline;
    Answer answer;
  };

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
