#pragma once
/// \file
/// The state that a Mover's parts share: the mailboxes between its threads, and the jobs in flight.

#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/os/mailbox.h"
#include "base/page_layout.h"
#include "client/mover/jobs.h"
#include "client/mover_types.h"
#include "client/pool_mapping.h"
#include "client/status_board.h"
#include "transport/device.h"

namespace pegaflow {

struct CloseMover {};
struct CancelLoad {
  std::uint64_t load = 0;
};

/// A message from the engine's threads to the mover's thread.
using MoverCommand = std::variant<CloseMover, CancelLoad, SaveJob, LoadJob>;

/// A message from the device's threads or MoverLoop's helper thread to the mover's thread.
struct MoverEvent {
  enum class Kind : std::uint8_t { kCompletion, kHelperDone };
  Kind kind = Kind::kHelperDone;
  Device::Completion completion;
};

/// A load whose last piece is being copied by the device, so that Mover::follow(), on the engine's
/// thread, may complete it early.
struct CopyingLoad {
  std::uint64_t ticket = 0;
  FollowedLoad report;  ///< Complete except for `took`.
  TimePoint accepted{};
  bool followed = false;  ///< It was completed early.
};

/// Lives as long as the Mover. Each accepted job reserves one of `max_jobs` places, until the
/// engine takes its report. So the mailboxes always have room for its completion and its report.
struct MoverState {
  MoverState(const MoverOptions& chosen, PageLayout of_engine, Device& its_device)
      : options(chosen),
        layout(std::move(of_engine)),
        device(its_device),
        commands(2 * chosen.max_jobs + 16),
        events(2 * chosen.max_jobs + 16),
        finished(chosen.max_jobs) {}

  const MoverOptions options;
  const PageLayout layout;
  Device& device;
  StatusBoard board;
  std::atomic<std::size_t> places_taken{0};
  Mailbox<MoverCommand> commands;
  Mailbox<MoverEvent> events;
  Mailbox<FinishedJob> finished;
  std::mutex copying_mutex;
  std::vector<CopyingLoad> copying;  ///< Under copying_mutex.

  // Bound to the mover's thread. (The helper thread writes `mapping` while the mover's thread does
  // not use it.)
  SteadyClock clock;
  std::uint64_t last_ticket = 0;  ///< Tickets identify jobs to the device, pins to the server.
  std::unordered_map<std::uint64_t, SaveJob> saves;
  std::unordered_map<std::uint64_t, LoadJob> loads;
  std::uint64_t pool_bytes = 0;  ///< The size of the server's pool; known once registered.
  PoolMapping mapping;

  /// The highest offset at which a page fits into the pool.
  [[nodiscard]] std::uint64_t last_page_begin() const { return pool_bytes - layout.page_bytes(); }
  [[nodiscard]] bool has_jobs() const noexcept { return !saves.empty() || !loads.empty(); }

  /// Queues the report of a save that has ended, for Mover::take_finished().
  void report(const SaveJob& job, std::size_t sealed_blocks, std::size_t copied_pages,
              std::optional<Error> error);
  /// The same for a load: the first `good_blocks` blocks were loaded, and the others failed.
  void report(LoadJob&& job, std::size_t good_blocks, std::size_t copied_pages,
              std::optional<Error> error);

 private:
  void send(FinishedJob&& report);
};

}  // namespace pegaflow
