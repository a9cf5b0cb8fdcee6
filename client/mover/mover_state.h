#pragma once
/// \file
/// The state that a Mover's parts share: the mailboxes between its threads, and the jobs in flight.

#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/os/mailbox.h"
#include "client/direct/guards.h"
#include "client/direct/pools.h"
#include "client/direct/sources.h"
#include "client/mover/copying_loads.h"
#include "client/mover/jobs.h"
#include "client/mover/kind_table.h"
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

/// Lives as long as the Mover. Each accepted job reserves one of `max_jobs` places, until the
/// engine takes its report. So the mailboxes always have room for its completions (one for each
/// member that it copies, and that of a save's mark) and its report.
struct MoverState {
  MoverState(const MoverOptions& chosen, KindTable of_engine, std::unique_ptr<Guards> its_guards,
             Device& its_device)
      : options(chosen),
        kinds(std::move(of_engine)),
        device(its_device),
        commands(2 * chosen.max_jobs + 16),
        events((kinds.layouts().size() + 2) * chosen.max_jobs + 16),
        finished(chosen.max_jobs),
        guards(std::move(its_guards)),
        sources(its_device, clock),
        pools(its_device, kinds.layouts().front(), clock) {}

  const MoverOptions options;
  const KindTable kinds;
  Device& device;
  StatusBoard board;
  std::atomic<std::size_t> places_taken{0};
  Mailbox<MoverCommand> commands;
  Mailbox<MoverEvent> events;
  Mailbox<FinishedJob> finished;
  CopyingLoads copying;
  /// Whether the server answers loads that follow their prefill,
  std::atomic<bool> may_follow{false};
  /// and whether engines of the direct group may read this one's memory, and it theirs.
  std::atomic<bool> is_direct{false};

  // Bound to the mover's thread. (The helper thread writes `mapping` while the mover's thread does
  // not use it.)
  SteadyClock clock;
  std::uint64_t last_ticket = 0;  ///< Tickets identify jobs to the device, pins to the server.
  std::unordered_map<std::uint64_t, SaveJob> saves;
  std::unordered_map<std::uint64_t, LoadJob> loads;
  Batches batches;
  const std::unique_ptr<Guards> guards;  ///< Only with a direct group.
  Sources sources;
  Pools pools;
  bool reads_pools = false;      ///< The pools of other nodes, past that of the server.
  std::uint64_t pool_bytes = 0;  ///< The size of the server's pool; known once registered.
  PoolMapping mapping;

  /// The highest offset at which a page of a kind fits into the pool.
  [[nodiscard]] std::uint64_t last_page_begin(std::size_t kind) const {
    return pool_bytes - kinds[kind].page_bytes;
  }
  [[nodiscard]] bool has_jobs() const noexcept { return !saves.empty() || !loads.empty(); }

  /// Queues the report of a save that has ended, for Mover::take_finished().
  void report(const SaveJob& job, std::size_t sealed_blocks, std::optional<Error> error);
  /// The same for a load: the blocks that its parts have done were loaded, unless it is in doubt,
  /// and the others failed.
  void report(const LoadJob& job);

 private:
  void send(FinishedJob&& report);
};

}  // namespace pegaflow
