#pragma once
/// \file
/// The load jobs of a mover: pins blocks, copies them, compares checksums, releases the pins.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "client/direct/next_piece.h"
#include "client/link.h"
#include "client/loop.h"
#include "client/mover/cleanup_calls.h"
#include "client/mover/mover_state.h"

namespace pegaflow {

/// Runs the load jobs in MoverState::loads. The parts of a load, one for each kind, are opened and
/// copied at the same time; the first that fails ends the others. Each step finds its job by
/// ticket, because the job may have ended meanwhile.
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
  /// The device completed a batch: after the last of a piece, continues with the part's next piece
  /// or ends the part.
  void on_copied(const BatchOwner& owner, Device::Completion&& completion);
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
    /// In place of slots: pages in the pool of another node, and how to read that if it is new.
    std::vector<std::uint32_t> pages{};
    std::uint64_t pool = 0;
    std::optional<FabricDescriptor> fabric{};
  };

  /// A part of a load, by the ticket of its job. It is found as long as it has not ended.
  struct PartId {
    std::uint64_t ticket = 0;
    std::size_t index = 0;
  };
  [[nodiscard]] LoadPart& part_of(const PartId& id) {
    return state_.loads.at(id.ticket).parts[id.index];
  }

  /// Opens the next piece: the blocks that have arrived by now, or that arrive first.
  void open(const PartId& id);
  void on_opened(const PartId& id, Result<Opened>&& opened);
  /// Whether the part still waits for a response.
  [[nodiscard]] bool is_asking(const PartId& id);
  /// The same two steps for a load that follows its prefill.
  void open_next(const PartId& id);
  void on_next(const PartId& id, Result<NextPiece>&& piece);
  void submit_direct(const PartId& id, std::span<const PageCopies::Page> pages, NextPiece&& piece);
  /// The piece cannot be read from the other engine: goes on with one from the pool.
  void skip_direct(const PartId& id, const Error& why);
  /// Opens the next piece, under a pin of its own, unless the load is over.
  void go_on(const PartId& id);
  /// The same after a pause.
  void ask_later(const PartId& id);
  /// The pages in the opened slots; no value if the response is inconsistent or a slot is beyond
  /// the pool.
  [[nodiscard]] std::optional<std::vector<PageCopies::Page>> place(const LoadPart& part,
                                                                   const Opened& opened) const;
  /// The same for such a load: the piece is in the pool, or its pages are blocks of its source.
  [[nodiscard]] std::optional<std::vector<PageCopies::Page>> place(const LoadPart& part,
                                                                   const NextPiece& piece) const;
  // ---- pieces in the pool of another node
  void on_pages(const PartId& id, const Opened& opened);
  /// The piece cannot be read from there: goes on through the pool of this node.
  void skip_pool(const PartId& id, const Error& why);
  /// The last copy of the piece has ended: asks whether its bytes count.
  void confirm(const PartId& id);
  void on_confirmed(const PartId& id, const Result<bool>& held);
  /// Ends a part, and the connection, after a response that is inconsistent.
  void drop(const PartId& id, Error why);
  /// Opens again, or ends the part, after a response without blocks.
  void wait_for_coming(const PartId& id, const Opened& opened);
  /// Ends a part whose remaining blocks would be computed sooner than they arrive.
  void cut(const PartId& id, LoadPace::Cut why);
  /// `reading`: of the engine that the piece is read from; without a peer: the pool.
  void submit(const PartId& id, std::span<const PageCopies::Page> pages,
              Sources::Reading&& reading = {});
  /// Starts the deadline of the copies of the current piece.
  void start_deadline(const PartId& id);
  /// Offers the load for early completion if the device gets or has the last piece of every part
  /// and no page is compared.
  void note_copying(std::uint64_t ticket, const LoadJob& job);
  /// The last batch of the piece has completed. `followed`: the load was completed early.
  void on_all_copied(const PartId& id, bool followed);
  /// Ends a piece that was read from another engine, after its last copy. Returns how many of its
  /// pages are good; the next piece comes from the pool if not all are.
  std::size_t end_direct(LoadJob& job, LoadPart& part);
  /// Subtracts the piece from `bytes_queued_`, and adds its time on the device to the job's.
  void count_copied(LoadJob& job, LoadPart& part);
  /// The indexes, in the piece, of pages that differ from the saved pages.
  static std::vector<std::uint32_t> find_corrupt(LoadJob& job, const LoadPart& part);
  /// Logs the pages, and makes the server invalidate their blocks.
  void report_corrupt(std::uint64_t pin, std::span<const std::uint32_t> places);
  /// No further page of the load is wanted.
  void give_up(LoadJob& job, const Error& why);
  /// Ends a part of which nothing is in flight, and the load with the last of its parts. With
  /// `error` the other parts are of no use.
  void end_part(const PartId& id, std::optional<Error> error);
  /// Removes the job from the table and reports it.
  void finish(std::uint64_t ticket);

  MoverState& state_;
  Link& link_;
  LoopTasks& tasks_;
  CleanupCalls& cleanup_;
  const std::function<void()> on_end_;

  std::uint64_t bytes_queued_ = 0;  ///< Bytes of loads that the device has not completed.
  TimePoint last_end_{};            ///< When the device completed the last piece.
  std::unordered_map<std::uint64_t, kj::Promise<void>> deadlines_;  ///< By the piece's pin.
  std::optional<TimePoint> last_corrupt_line_;  ///< When corrupt pages were last logged.
  std::uint64_t corrupt_pages_ = 0;             ///< Since the start.
};

}  // namespace pegaflow
