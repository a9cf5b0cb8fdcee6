#pragma once
/// \file
/// The saves of a mover: reserve, copy, publish.

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
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

  /// Begins the job; with `refusal` it only reports that.
  void begin(SaveJob&& job, std::optional<Error> refusal);
  void on_copied(const Device::Completion& completion);
  /// Ends the jobs that wait for the server; the others end with their copies. `lost`: the
  /// connection is gone.
  void end(bool lost);

 private:
  void on_slots(std::uint64_t ticket, Result<std::vector<std::uint32_t>>&& slots);
  /// The copies into `slots`; no value if these make no sense.
  std::optional<std::vector<Device::Copy>> place(const SaveJob& job,
                                                 const std::vector<std::uint32_t>& slots);
  /// Whether a page that is being saved gets a checksum.
  bool takes_checksum();
  void submit(std::uint64_t ticket, SaveJob& job, std::vector<Device::Copy>&& copies);
  void publish(std::uint64_t ticket, SaveJob& job, const Device::Completion& completion);
  /// Takes the job out of the table and reports it.
  void finish(std::uint64_t ticket, std::size_t sealed_blocks, std::size_t copied_pages,
              std::optional<Error> error);

  MoverState& state_;
  Link& link_;
  LoopTasks& tasks_;
  CleanupCalls& cleanup_;
  const std::function<void()> on_end_;
  std::minstd_rand chance_{std::random_device{}()};  ///< Selects the pages of a sample.
};

}  // namespace pegaflow
