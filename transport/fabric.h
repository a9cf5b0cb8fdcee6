#pragma once
/// \file
/// The seam between us and whatever carries bytes from one node to another.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/region.h"

namespace pegaflow {

/// Reads what peers hold into memory of ours, and lets peers read memory of ours.
///
/// The reader is the one who acts: it names what it wants of which region of a peer and where in a
/// region of its own the bytes go. Nothing that a peer says or does changes a byte outside the
/// places of a batch that is under way.
///
/// A batch is answered once, and settled once. *Answered*: its caller knows which chunks came.
/// *Settled*: nobody can write to its places any more. Between the two, and before, no place of it
/// may be used for anything else. A cancelled or late batch is answered at once and settled when
/// the backend knows, however long that takes.
///
/// Chunks are asked for in the order given, so that what comes first is what the caller named
/// first; a batch of kForeground overtakes every chunk of kBackground that is not yet asked for.
///
/// Thread-safe: every function may be called from any thread. A backend has one thread that does
/// the work; what callers hand over is bounded, and full is kBusy at once.
class Fabric {
 public:
  /// A peer by the number that connect() gave it. Not used again.
  enum class PeerId : std::uint32_t {};

  enum class Priority : std::uint8_t {
    kForeground,  ///< Somebody's first token waits for it.
    kBackground,  ///< Prefetches and copies; never more than a part of the window.
  };

  /// One run of bytes, usually a page.
  struct Chunk {
    RegionId remote_region{};  ///< Of the peer.
    std::uint64_t remote_offset = 0;
    RegionId local_region{};  ///< Of this Fabric.
    std::uint64_t local_offset = 0;
    std::uint64_t size_bytes = 0;  ///< At least 1.
  };

  struct Batch {
    std::uint64_t ticket = 0;  ///< The caller's name for it; unique among batches not yet settled.
    PeerId peer{};
    Priority priority = Priority::kForeground;
    TimePoint deadline;  ///< Chunks that are not there by then are kTimeout.
    std::vector<Chunk> chunks;
  };

  /// What became of a batch.
  struct Completion {
    std::uint64_t ticket = 0;
    /// By chunk: no value when all its bytes are there and right, else why not. kTimeout,
    /// kCancelled; kPeerLost: the peer or the way to it broke; kGone: another incarnation, or the
    /// owner does not lend the region any more; kCorrupt: other bytes than the peer has, or no
    /// sense in what it says; kInvalidArgument: a region or an offset out of range, or no such
    /// peer. The bytes of a place whose chunk has an error are anybody's guess.
    std::vector<std::optional<Errc>> chunks;
    std::string detail;  ///< Of the first error, for a log.
    /// False: the batch is answered and not yet settled. A second Completion with this ticket
    /// follows, whose `chunks` are empty.
    bool quiesced = true;
  };

  /// Called on the backend's thread. May only hand the completion on (a Mailbox), and may not call
  /// the Fabric.
  using CompletionSink = std::function<void(Completion&&)>;

  /// Ends every batch (kCancelled), settles it, and then every connection. Afterwards nothing
  /// touches a region.
  virtual ~Fabric() = default;

  /// Lets `memory` be read into and, after lend(), by peers. It stays mapped until
  /// unregister_region() has returned or the Fabric is gone. Registering a pool with a network card
  /// may take seconds.
  /// Errors: kOutOfCapacity when there are too many regions; kInvalidArgument when it is empty; the
  /// backend's own when it cannot be registered.
  virtual Result<RegionId> register_region(std::span<std::byte> memory) = 0;

  /// Until when peers may read a region; at first they may not, and a time that has passed ends it.
  /// A backend that sees each read refuses it from then on (kGone for the reader).
  ///
  /// When the bytes may change: if `until` had passed, once this has returned, with a backend that
  /// sees each read: it waits until what it had begun to send is sent or dropped. After a lease
  /// that ended by itself the owner leaves them alone for a margin, with every backend: a read that
  /// began in time may still be going on, and with one-sided reads it is the readers who stop, by
  /// their own clocks.
  ///
  /// Times are of the clock that the backend was made with. With SteadyClock a machine that sleeps
  /// has its leases stand still: give it one of CLOCK_BOOTTIME where machines do.
  /// Errors: kInvalidArgument when there is no such region.
  virtual Result<void> lend(RegionId region, TimePoint until) = 0;

  /// Forgets a region, and returns when nothing touches its memory any more, however long that
  /// takes. Batches into it are kCancelled. Unknown regions are fine.
  virtual void unregister_region(RegionId region) = 0;

  /// What peers need to read from us: with all regions that are registered now.
  [[nodiscard]] virtual FabricDescriptor describe() const = 0;

  /// Opens the way to a peer, by a description that its present incarnation has just given: never
  /// by one that was stored. Returns at once; that it cannot be reached shows in its batches.
  /// A peer that is lost stays lost, and counts until disconnect(): greet it again and connect
  /// anew.
  /// Errors: kInvalidArgument when the description makes no sense; kRefused when it is of another
  /// backend; kBusy when there are too many peers or the queue is full.
  virtual Result<PeerId> connect(const FabricDescriptor& peer) = 0;

  /// Ends the way to a peer; its batches are kCancelled. Unknown peers are fine.
  /// Errors: kBusy when the queue is full.
  virtual Result<void> disconnect(PeerId peer) = 0;

  /// Accepts a batch. Errors: kBusy when its queue is full; kInvalidArgument when it has no chunk
  /// or too many. What else is wrong is said by chunk in its completion.
  virtual Result<void> read(Batch batch) = 0;

  /// Answers the batch now, with kCancelled for what is not there yet. Unknown tickets are fine.
  /// Errors: kBusy when the queue is full; the batch then goes on until its deadline.
  virtual Result<void> cancel(std::uint64_t ticket) = 0;
};

}  // namespace pegaflow
