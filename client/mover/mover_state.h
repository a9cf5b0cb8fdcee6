#pragma once
/// \file
/// What a Mover's parts share: the mailboxes between its threads, and the jobs under way.

#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/job_id.h"
#include "base/os/mailbox.h"
#include "base/page_layout.h"
#include "client/mover.h"
#include "client/pool_mapping.h"
#include "client/status_board.h"
#include "transport/device.h"

namespace pegaflow {

/// One accepted save or load, until it is reported. Bound to the private thread.
struct MoverJob {
  enum class Phase : std::uint8_t {
    kAsking,    ///< reserve or open is under way; nothing is copied.
    kCopying,   ///< The device has the batch.
    kSettling,  ///< The copies have ended; publish is under way.
  };
  Mover::Finished::Kind kind = Mover::Finished::Kind::kSave;
  Phase phase = Phase::kAsking;
  std::uint64_t id = 0;  ///< The engine's name: the job's number, or the load.
  TimePoint accepted{};
  JobId job;                   ///< Of a save.
  std::vector<BlockKey> keys;  ///< Of a save.
  Device::Event after = Device::Event::kNow;
  Id128 token;  ///< Of a load, with `first`.
  std::uint64_t first = 0;
  std::vector<std::uint32_t> blocks;
  // A load goes in pieces where its blocks come from another node, one behind the other.
  std::uint64_t pin = 0;                    ///< Of the piece under way.
  std::size_t done = 0;                     ///< Blocks of earlier pieces: loaded.
  std::size_t copied = 0;                   ///< Their pages.
  std::size_t coming = 0;                   ///< Behind this piece, what may still come.
  std::optional<TimePoint> coming_until{};  ///< Since it is known that something does.
  std::size_t copies = 0;                   ///< Pages that the device was given, of this piece.
  std::size_t skipped = 0;                  ///< Of a save: blocks that got no slot.
  /// Of a load, by copy: what was taken when the page was saved. Empty: nothing is compared.
  std::vector<std::uint64_t> checksums;
  std::size_t verified = 0;
  std::size_t corrupt = 0;
  std::optional<LoadPace::Computing> computing{};  ///< Of a load, with the next ones.
  LoadPace pace;
  std::optional<TimePoint> worth_until{};  ///< Of the open that is in flight.
  TimePoint submitted{};                   ///< When the device was given the piece.
  Duration copying{};                      ///< What the device took for all pieces.
  std::optional<LoadPace::Cut> cut{};
  std::optional<Error> gave_up;  ///< Why no further page is wanted; it may have come too late.
  bool connection_lost = false;  ///< Then nothing that it copied counts.
};

/// From the engine's threads to the private one.
struct MoverCommand {
  enum class Kind : std::uint8_t { kClose, kJob, kCancelLoad };
  Kind kind = Kind::kClose;
  std::uint64_t load = 0;
  MoverJob job;
};

/// From the device's threads and the helper to the private one.
struct MoverEvent {
  enum class Kind : std::uint8_t { kCompletion, kHelperDone };
  Kind kind = Kind::kHelperDone;
  Device::Completion completion;
};

/// The last piece of a load that the device has, for the engine's thread.
struct CopyingLoad {
  std::uint64_t ticket = 0;
  Mover::Followed told;  ///< But for `took`.
  TimePoint accepted{};
  bool followed = false;
};

/// Lives as long as the Mover. A job takes its place when it is accepted and gives it back when it
/// is taken by the engine, so that neither its completion nor its report can find a box full.
struct MoverState {
  MoverState(const Mover::Options& chosen, PageLayout of_engine, Device& its_device)
      : options(chosen),
        layout(std::move(of_engine)),
        device(its_device),
        commands(2 * chosen.max_jobs + 16),
        events(2 * chosen.max_jobs + 16),
        finished(chosen.max_jobs) {}

  const Mover::Options options;
  const PageLayout layout;
  Device& device;
  StatusBoard board;
  std::atomic<std::size_t> places_taken{0};
  Mailbox<MoverCommand> commands;
  Mailbox<MoverEvent> events;
  Mailbox<Mover::Finished> finished;
  std::mutex copying_mutex;
  std::vector<CopyingLoad> copying;  ///< Under copying_mutex.

  // Bound to the private thread (the helper writes `mapping` while that thread waits for it).
  SteadyClock clock;
  std::uint64_t last_ticket = 0;  ///< Names jobs to the device, and pins to the server.
  std::unordered_map<std::uint64_t, MoverJob> jobs;
  PoolMapping mapping;

  /// Reports the end of a job; its place is given back when somebody takes the report. Of a load
  /// the first `good_blocks` are whole and the others failed.
  void report(MoverJob&& job, std::size_t good_blocks, std::size_t copied_pages,
              std::optional<Error> error);
};

}  // namespace pegaflow
