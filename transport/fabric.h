#pragma once
/// \file
/// The interface to the transports that move bytes between nodes.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/memory.h"
#include "transport/region.h"

namespace pegaflow {

/// Reads memory of peers into local memory, and lets peers read local memory.
///
/// The reader acts: it names the bytes of a peer's region and the place in a local region that
/// receives them. No message and no action of a peer changes a byte outside the places of a batch
/// in flight.
///
/// A batch ends in two steps. *Completed*: the caller has a result for each chunk. *Quiesced*: no
/// device or peer can still write to its places. Until a batch is quiesced, its places may not be
/// used for anything else. A cancelled or late batch completes at once and is quiesced when the
/// backend knows that it is, however long that takes.
///
/// Chunks are requested in the order given, so the first ones arrive first. A batch of kForeground
/// overtakes every chunk of kBackground that is not yet requested.
///
/// Thread-safe: every function may be called from any thread. The backend works on a thread of its
/// own. Its queues are bounded: a full one returns kBusy at once.
class Fabric {
 public:
  /// Identifies a peer; returned by connect() and never reused.
  enum class PeerId : std::uint32_t {};

  enum class Priority : std::uint8_t {
    kForeground,  ///< A request's first token waits for it.
    kBackground,  ///< Prefetches and replication; limited to a part of the window.
  };

  /// One run of bytes, usually a page.
  struct Chunk {
    RegionId remote_region{};  ///< The peer's.
    std::uint64_t remote_offset = 0;
    RegionId local_region{};  ///< This Fabric's.
    std::uint64_t local_offset = 0;
    std::uint64_t size_bytes = 0;  ///< At least 1.
  };

  struct Batch {
    std::uint64_t ticket = 0;  ///< Chosen by the caller; unique until the batch is quiesced.
    PeerId peer{};
    Priority priority = Priority::kForeground;
    TimePoint deadline;  ///< Chunks that are incomplete by then are kTimeout.
    std::vector<Chunk> chunks;
  };

  /// The result of a batch.
  struct Completion {
    std::uint64_t ticket = 0;
    /// By chunk: no value when all its bytes arrived intact, else the reason. kTimeout; kCancelled;
    /// kPeerLost: the peer or the path to it broke; kGone: another incarnation, or the owner no
    /// longer lends the region; kCorrupt: the bytes differ from the peer's, or its messages are
    /// invalid; kInvalidArgument: a region or an offset is out of range, or there is no such peer.
    /// The place of a chunk with an error has unspecified content.
    std::vector<std::optional<Errc>> chunks;
    std::string detail;  ///< The first error's, for a log.
    /// False: the batch has completed and is not yet quiesced. A second Completion with this ticket
    /// follows, whose `chunks` are empty.
    bool quiesced = true;
  };

  /// Called on the backend's thread. May only pass the completion on (a Mailbox), and may not call
  /// the Fabric.
  using CompletionSink = std::function<void(Completion&&)>;

  /// Cancels every batch (kCancelled), quiesces it, and then closes every connection. Afterwards
  /// nothing touches a region.
  virtual ~Fabric() = default;

  /// Registers `memory` as a target of reads and, after lend(), for reads by peers. It stays mapped
  /// until unregister_region() has returned or the Fabric is gone. Registering a pool with a
  /// network card may take seconds.
  /// Errors: kOutOfCapacity when there are too many regions; kInvalidArgument when it is empty;
  /// kRefused when the backend cannot register memory of that kind; the backend's own when it
  /// cannot be registered.
  virtual Result<RegionId> register_region(const Memory& memory) = 0;

  /// Sets the time until which peers may read a region. Initially they may not; a time in the past
  /// ends the lease. A backend that serves each read itself rejects later reads (kGone for the
  /// reader).
  ///
  /// When the owner may change the bytes: with a backend that serves each read itself, after a call
  /// with a time in the past has returned, because the call waits until the reads in progress are
  /// sent or dropped. After a lease that expired, with every backend, only after a margin: a read
  /// that began in time may still be in flight, and with one-sided reads it is the readers that
  /// stop, by their own clocks.
  ///
  /// Times are of the clock that the backend was created with. With SteadyClock, leases stand still
  /// while the machine is suspended: use a clock on CLOCK_BOOTTIME where machines suspend.
  /// Errors: kInvalidArgument when there is no such region.
  virtual Result<void> lend(RegionId region, TimePoint until) = 0;

  /// Removes a region, and returns when nothing touches its memory any longer, however long that
  /// takes. Batches into it are kCancelled. Unknown regions are fine.
  virtual void unregister_region(RegionId region) = 0;

  /// Describes this fabric and its currently registered regions to peers.
  [[nodiscard]] virtual FabricDescriptor describe() const = 0;

  /// Opens the path to a peer, by a description that its present incarnation has just sent: never
  /// by a stored one. Returns at once; batches report a peer that cannot be reached. A lost peer
  /// stays lost, and counts until disconnect(): obtain a new description and connect again.
  /// Errors: kInvalidArgument when the description is invalid; kRefused when it is another
  /// backend's; kBusy when there are too many peers or the queue is full.
  virtual Result<PeerId> connect(const FabricDescriptor& peer) = 0;

  /// Closes the path to a peer; its batches are kCancelled. Unknown peers are fine. Errors: kBusy
  /// when the queue is full.
  virtual Result<void> disconnect(PeerId peer) = 0;

  /// Accepts a batch. Errors: kBusy when its queue is full; kInvalidArgument when it has no chunk
  /// or too many. All other errors are reported by chunk in its completion.
  virtual Result<void> read(Batch batch) = 0;

  /// Completes the batch now, with kCancelled for chunks that have not arrived. Unknown tickets are
  /// fine. Errors: kBusy when the queue is full; the batch then continues until its deadline.
  virtual Result<void> cancel(std::uint64_t ticket) = 0;
};

}  // namespace pegaflow
