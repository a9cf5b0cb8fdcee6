#pragma once
/// \file
/// The save jobs of a mover: reserves slots, copies the blocks, publishes them.

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "client/link.h"
#include "client/loop.h"
#include "client/mover/cleanup_calls.h"
#include "client/mover/mover_state.h"

namespace pegaflow {

/// Runs the save jobs in MoverState::saves. Each step finds its job by ticket, because the job may
/// have ended meanwhile.
///
/// Bound to the mover's KJ thread.
class Saves {
 public:
  /// All outlive it. `on_end` is called after each job that has ended.
  Saves(MoverState& state, Link& link, LoopTasks& tasks, CleanupCalls& cleanup,
        std::function<void()> on_end)
      : state_(state), link_(link), tasks_(tasks), cleanup_(cleanup), on_end_(std::move(on_end)) {}

  /// Begins the job. With `refusal` the job only fails with that error.
  void begin(SaveJob&& job, std::optional<Error> refusal);
  /// The device completed a batch: after the last of the job, publishes its pages or reports the
  /// failure.
  void on_copied(const BatchOwner& owner, Device::Completion&& completion);
  /// Ends the jobs that wait for a response of the server, or for other engines; jobs that are
  /// being copied end with their copies. `lost`: the connection is gone. Otherwise, jobs that are
  /// being published end with the response.
  void end(bool lost);

 private:
  void on_slots(std::uint64_t ticket, Result<std::vector<std::uint32_t>>&& slots);
  /// The pages in `slots`; no value if their number is wrong or one is beyond the pool.
  std::optional<std::vector<PageCopies::Page>> place(const SaveJob& job,
                                                     const std::vector<std::uint32_t>& slots);
  /// Whether the next page to save gets a checksum; random if only a sample does.
  bool takes_checksum();
  void submit(std::uint64_t ticket, SaveJob& job, std::span<const PageCopies::Page> pages);
  /// The last batch of the job has completed.
  void on_all_copied(std::uint64_t ticket, SaveJob& job);
  void publish(std::uint64_t ticket, SaveJob& job);
  /// The job is sealed: waits until no other engine reads its blocks, then ends it.
  void await_reads(std::uint64_t ticket, SaveJob& job);
  /// Whether other engines may read the job's blocks, as soon as their content is final.
  [[nodiscard]] bool is_offered(const SaveJob& job) const;
  /// Tells the server once the engine's work on the job's blocks is over.
  void watch(std::uint64_t ticket, SaveJob& job);
  void on_final(std::uint64_t ticket, const Device::Completion& completion);
  /// Closes the job's guard, removes the job from the table and reports it.
  void finish(std::uint64_t ticket, std::size_t sealed_blocks, std::optional<Error> error);

  MoverState& state_;
  Link& link_;
  LoopTasks& tasks_;
  CleanupCalls& cleanup_;
  const std::function<void()> on_end_;
  std::minstd_rand chance_{std::random_device{}()};  ///< Chooses the sample.
};

}  // namespace pegaflow
