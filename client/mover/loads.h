#pragma once
/// \file
/// The load jobs of a mover: pins blocks, copies them, compares checksums, releases the pins.

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

  /// Begins the job. With `refusal` the job only fails with that error.
  void begin(LoadJob&& job, std::optional<Error> refusal);
  /// The device completed the copies of a piece: continues with the next piece, or reports the
  /// load.
  void on_copied(const Device::Completion& completion);
  /// Cancels the load that the engine named `load`.
  void cancel(std::uint64_t load);
  /// Ends the jobs that wait for a response of the server; the others end with their copies.
  /// `lost`: the connection is gone.
  void end(bool lost);

 private:
  /// The response to `open`.
  struct Opened {
    std::vector<std::uint32_t> slots;
    std::vector<std::uint64_t> checksums;  ///< Empty if there are none.
    std::size_t coming = 0;                ///< Further blocks that are still in flight.
    std::optional<LoadPace::Cut> late{};   ///< Why the server stopped waiting for them.
  };

  /// Opens the next piece: the blocks that have arrived by now, or that arrive first.
  void open(std::uint64_t ticket);
  void on_opened(std::uint64_t ticket, Result<Opened>&& opened);
  /// The copies out of the opened slots; no value if the response is inconsistent or a slot is
  /// beyond the pool.
  [[nodiscard]] std::optional<std::vector<Device::Copy>> place(const LoadJob& job,
                                                               const Opened& opened) const;
  /// Opens again, or ends the load, after a response without blocks.
  void wait_for_coming(std::uint64_t ticket, LoadJob& job, const Opened& opened);
  /// Ends a load whose remaining blocks would be computed sooner than they arrive.
  void cut(std::uint64_t ticket, LoadJob& job, LoadPace::Cut why);
  void submit(std::uint64_t ticket, LoadJob& job, std::vector<Device::Copy>&& copies);
  /// Starts the deadline of the copies of the current piece.
  void start_deadline(std::uint64_t ticket, const LoadJob& job);
  /// Offers the load for early completion if this is its last piece and no page is compared.
  void note_copying(std::uint64_t ticket, const LoadJob& job, std::span<const Device::Copy> copies);
  /// Withdraws this offer, since the copies have ended. Returns whether the load was completed
  /// early.
  bool no_longer_copying(std::uint64_t ticket);
  /// Subtracts the piece from `bytes_queued_`, and adds its time on the device to the job's.
  void count_copied(std::uint64_t ticket, LoadJob& job);
  /// The indexes, in the piece, of pages that differ from the saved pages.
  static std::vector<std::uint32_t> find_corrupt(LoadJob& job,
                                                 const Device::Completion& completion);
  /// Logs the pages, and makes the server invalidate their blocks.
  void report_corrupt(std::uint64_t pin, std::span<const std::uint32_t> places);
  /// Removes the job from the table and reports it.
  void finish(std::uint64_t ticket, std::size_t good_blocks, std::size_t copied_pages,
              std::optional<Error> error);

  MoverState& state_;
  Link& link_;
  LoopTasks& tasks_;
  CleanupCalls& cleanup_;
  const std::function<void()> on_end_;

  std::uint64_t bytes_queued_ = 0;  ///< Bytes of loads that the device has not completed.
  TimePoint last_end_{};            ///< When the device completed the last piece.
  std::unordered_map<std::uint64_t, kj::Promise<void>> deadlines_;
  std::optional<TimePoint> last_corrupt_line_;  ///< When corrupt pages were last logged.
  std::uint64_t corrupt_pages_ = 0;             ///< Since the start.
};

}  // namespace pegaflow
