#pragma once
/// \file
/// The seam between us and whatever memory an engine keeps its KV cache in.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/page_layout.h"
#include "transport/checksum.h"

namespace pegaflow {

/// Copies pages between an engine's blocks and the pool, on threads of its own.
///
/// A batch is one job's copies in one direction. Batches of loads overtake batches of saves. Within
/// a batch, pages are copied in the order given. Each batch that was accepted completes exactly
/// once, whatever happens to it: after its completion no byte of it is touched any more, and that
/// is the only moment at which slots and engine blocks may be reused.
///
/// Thread-safe: submit(), cancel() and record_event() may be called from any thread.
class Device {
 public:
  enum class Direction : std::uint8_t {
    kSave,  ///< Engine block to pool.
    kLoad,  ///< Pool to engine block.
  };

  /// What the engine queues its work on, in the words of the device: a CUstream. 0: its default
  /// one, and the only one where work is not queued.
  enum class Queue : std::uintptr_t { kDefault = 0 };

  /// A point in the engine's own work, after which its blocks hold what they should. 0: now.
  enum class Event : std::uint64_t { kNow = 0 };

  struct Copy {
    std::uint32_t block = 0;        ///< Below layout.block_count().
    std::uint64_t pool_offset = 0;  ///< Of the page's first byte in the pool.
    bool checksum = false;          ///< Whether the completion is to have this page's checksum.
  };

  struct Batch {
    std::uint64_t ticket = 0;  ///< The caller's name for it; unique among batches under way.
    Direction direction = Direction::kSave;
    Event after = Event::kNow;
    std::vector<Copy> copies;
  };

  struct Completion {
    std::uint64_t ticket = 0;
    std::size_t copied = 0;      ///< How many copies, from the first on, are whole.
    std::optional<Error> error;  ///< Why not all: kCancelled, or what the device said.
    /// By copy: PageChecksum of the bytes on the engine's side, read there after (load) or while
    /// (save) they were copied, so that the way between engine and pool is covered too. kNoChecksum
    /// where none was wanted or the page was not copied. Empty when no copy wanted one.
    std::vector<std::uint64_t> checksums;
  };

  /// Called on a thread of the device, once a batch. May only hand the completion on (a Mailbox).
  using CompletionSink = std::function<void(Completion&&)>;

  virtual ~Device() = default;

  /// Before the first batch: which blocks there are, which pool, and who hears of completions.
  /// Registering a pool with an accelerator may take a second. Not while attached.
  /// Errors: kInvalidArgument, kRefused or kIo in the device's words; it is then not attached.
  virtual Result<void> attach(const PageLayout& layout, std::span<std::byte> pool,
                              CompletionSink sink) = 0;

  /// Ends the use of the pool: cancels what is queued, waits for what is under way, however long it
  /// takes, and hands over all completions. Afterwards nothing touches the pool. Idempotent.
  virtual void detach() = 0;

  /// Marks the engine's work on `queue` so far. Cheap; never waits.
  /// Errors: kInternal when the device is broken: the caller then drops its save.
  virtual Result<Event> record_event(Queue queue) = 0;

  /// Accepts a batch. Errors: kBusy when its queue is full, kGone when not attached,
  /// kInvalidArgument for a block or an offset out of range, kInternal once the device is broken.
  virtual Result<void> submit(Batch batch) = 0;

  /// Where a device and its engine queue their work: if all of a batch of loads is queued and will
  /// have ended `within` so long, makes what the engine queues on `queue` from now on wait for it.
  /// True: whatever is queued there later finds the loaded blocks whole. The batch completes as
  /// always, later. False: not that far, unknown, over, or a device that does not do this. May be
  /// called from any thread, and never waits itself.
  /// Errors: kInternal when the device is broken.
  virtual Result<bool> complete_early(std::uint64_t /*ticket*/, Queue /*queue*/,
                                      Duration /*within*/) {
    return false;
  }

  /// No further page of the batch is copied; its completion comes as soon as the pages under way
  /// have ended. Unknown tickets are fine.
  virtual void cancel(std::uint64_t ticket) = 0;
};

}  // namespace pegaflow
