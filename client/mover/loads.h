#pragma once
/// \file
/// The loads of a mover: open, copy, compare, release.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "client/link.h"
#include "client/loop.h"
#include "client/mover/cleanup_calls.h"
#include "client/mover/mover_state.h"

namespace pegaflow {

/// Runs the load jobs in MoverState::loads. Each step finds its job by ticket, because the job may
/// have ended meanwhile.
///
/// Bound to the mover's KJ thread.
class Loads {
 public:
  /// All outlive it. `on_end` is called after each job that has ended.
  Loads(MoverState& state, Link& link, LoopTasks& tasks, CleanupCalls& cleanup,
        std::function<void()> on_end)
      : state_(state), link_(link), tasks_(tasks), cleanup_(cleanup), on_end_(std::move(on_end)) {}

  /// Begins the job; with `refusal` it only reports that.
  void begin(LoadJob&& job, std::optional<Error> refusal);
  void on_copied(const Device::Completion& completion);
  /// Cancels the loads with this name of the engine's.
  void cancel(std::uint64_t load);
  /// Ends the jobs that wait for the server; the others end with their copies. `lost`: the
  /// connection is gone.
  void end(bool lost);

 private:
  /// The response to `open`.
  struct Opened {
    std::vector<std::uint32_t> slots;
    std::vector<std::uint64_t> checksums;  ///< Empty if there are none.
    std::size_t coming = 0;                ///< Further blocks that may still arrive.
    std::optional<LoadPace::Cut> late{};   ///< Why waiting for them is useless.
  };

  /// Opens the next piece.
  void open(std::uint64_t ticket);
  void on_opened(std::uint64_t ticket, Result<Opened>&& opened);
  /// The copies out of the opened slots; no value if these make no sense.
  [[nodiscard]] std::optional<std::vector<Device::Copy>> place(const LoadJob& job,
                                                               const Opened& opened) const;
  /// Continues a load of which no further block has arrived.
  void wait_for_coming(std::uint64_t ticket, LoadJob& job, const Opened& opened);
  /// Ends a load whose remaining blocks are computed sooner than they arrive.
  void cut(std::uint64_t ticket, LoadJob& job, LoadPace::Cut why);
  void submit(std::uint64_t ticket, LoadJob& job, std::vector<Device::Copy>&& copies);
  void start_deadline(std::uint64_t ticket, const LoadJob& job);
  /// Offers the last piece of a load for early completion.
  void note_copying(std::uint64_t ticket, const LoadJob& job, std::span<const Device::Copy> copies);
  /// Withdraws that when the device has ended the piece; whether the load was completed early.
  bool no_longer_copying(std::uint64_t ticket);
  /// Subtracts the piece from the device's queue and adds its time to the job's.
  void count_copied(std::uint64_t ticket, LoadJob& job);
  /// The places of pages that differ from the saved ones.
  static std::vector<std::uint32_t> find_corrupt(LoadJob& job,
                                                 const Device::Completion& completion);
  void report_corrupt(std::uint64_t pin, std::span<const std::uint32_t> places);
  /// Takes the job out of the table and reports it.
  void finish(std::uint64_t ticket, std::size_t good_blocks, std::size_t copied_pages,
              std::optional<Error> error);

  MoverState& state_;
  Link& link_;
  LoopTasks& tasks_;
  CleanupCalls& cleanup_;
  const std::function<void()> on_end_;

  std::uint64_t bytes_queued_ = 0;  ///< In the device's queue.
  TimePoint last_end_{};            ///< When the device completed the last piece.
  std::unordered_map<std::uint64_t, kj::Promise<void>> deadlines_;
  std::optional<TimePoint> last_corrupt_line_;
  std::uint64_t corrupt_pages_ = 0;
};

}  // namespace pegaflow
