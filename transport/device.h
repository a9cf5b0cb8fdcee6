#pragma once
/// \file
/// The interface to the memory in which an engine keeps its KV cache.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/unique_fd.h"
#include "base/page_layout.h"
#include "transport/checksum.h"
#include "transport/region.h"

namespace pegaflow {

/// The name of an allocation on a GPU, for other processes of this host: CUDA's IPC handle.
using MemoryHandle = std::array<std::byte, 64>;

/// Memory of a GPU that has no such name: ranges of addresses, each of several allocations of
/// CUDA's virtual memory management (PyTorch's expandable segments).
struct MappedMemory {
  /// By range: the sizes of its allocations, in the order of their addresses.
  std::vector<std::vector<std::uint64_t>> ranges{};
  std::vector<std::uint32_t> range_of{};  ///< The range that contains a segment, by segment.
  /// A DescriptorBox with a descriptor of each allocation, in the order of `ranges`. They keep the
  /// memory from being freed.
  std::shared_ptr<const UniqueFd> descriptors{};
};

/// Memory as engines of other hosts read it through a Fabric.
struct NetworkMemory {
  FabricDescriptor fabric{};
  /// A place in one of its regions.
  struct Place {
    RegionId region{};
    std::uint64_t offset = 0;
    bool operator==(const Place&) const = default;
  };
  std::vector<Place> segments{};     ///< Those of block 0, in the order of the page.
  std::optional<RegionId> guards{};  ///< An array of 64-bit words; none: the peer has no guards.
};

/// The KV cache memory of another engine's process, on this host or on another one.
struct PeerMemory {
  /// In the order of the page; `base` is an address in that process and must not be dereferenced.
  std::vector<Segment> segments{};
  std::uint64_t block_count = 0;
  /// Memory of a GPU has one for each segment: the allocation that contains it, and the segment's
  /// `base` is its offset in there. Or `mapped`, and `base` is the offset in a range. Ordinary
  /// memory has neither.
  std::vector<MemoryHandle> handles{};
  std::optional<MappedMemory> mapped{};
  /// That process's pidfd. Borrowed until remove_peer() or detach() has returned. -1: it is on
  /// another host.
  int process = -1;
  /// How other hosts reach it, if they can. For a process on another host the only way: the bases
  /// of the segments, the handles and the pidfd have no meaning then.
  std::optional<NetworkMemory> network{};

  [[nodiscard]] bool is_on_gpu() const noexcept { return !handles.empty() || mapped.has_value(); }
};

/// Copies pages between an engine's blocks and the pool, on threads of its own.
///
/// A batch is one job's copies in one direction and of one layout. Batches of loads overtake
/// batches of saves. Within a batch, pages are copied in the order given. Each accepted batch
/// completes exactly once, in every case. After its completion the device touches none of its
/// bytes, and only then may slots and engine blocks be reused.
///
/// Thread-safe: submit(), cancel(), record_event(), add_peer() and remove_peer() may be called from
/// any thread.
class Device {
 public:
  enum class Direction : std::uint8_t {
    kSave,  ///< Engine block to pool.
    kLoad,  ///< Pool, or the memory of a peer, to engine block.
  };

  /// The queue of the engine's work, as the device identifies it: a CUstream. 0: the default
  /// stream; the only value for devices without queues.
  enum class Queue : std::uintptr_t { kDefault = 0 };

  /// A point in the engine's own work, after which its blocks have their final content. 0: now.
  enum class Event : std::uint64_t { kNow = 0 };

  struct Copy {
    std::uint32_t block = 0;        ///< Below the layout's block_count().
    std::uint64_t pool_offset = 0;  ///< The page's first byte in the pool; with a peer: its block.
    bool checksum = false;          ///< Whether the completion includes this page's checksum.
  };

  struct Batch {
    std::uint64_t ticket = 0;  ///< Chosen by the caller; unique among the batches in flight.
    Direction direction = Direction::kSave;
    Event after = Event::kNow;
    std::vector<Copy> copies;
    std::size_t layout = 0;  ///< The index, among the attached layouts, of that of its pages.
    /// If not 0, a load reads its pages from the memory of this peer, and `pool_offset` of each
    /// copy is the number of the peer's block. Only for layout 0.
    std::uint64_t peer = 0;
    /// For a peer on another host: the places of the guards to read once all bytes of the batch
    /// have arrived.
    std::vector<std::uint32_t> guards{};
  };

  struct Completion {
    std::uint64_t ticket = 0;
    std::size_t copied = 0;      ///< Copies that are complete, counted from the first.
    std::optional<Error> error;  ///< Why not all: kCancelled, or the device's error.
    /// By copy: the PageChecksum of the bytes on the engine's side, read there after (load) or
    /// during (save) the copy, so that it also covers the transfer between engine and pool.
    /// kNoChecksum where none was requested or the page was not copied. Empty when no copy
    /// requested one.
    std::vector<std::uint64_t> checksums;
    /// The values of Batch::guards, read after the last byte of the copies. Empty if not all of the
    /// batch was copied, or if only they could not be read, which sets no `error`.
    std::vector<std::uint64_t> guards{};
  };

  /// Called on a thread of the device, once per batch. May only pass the completion on (a Mailbox).
  using CompletionSink = std::function<void(Completion&&)>;

  virtual ~Device() = default;

  /// Sets the blocks, the pool and the receiver of completions, before the first batch. Registering
  /// a pool with an accelerator may take a second. Not while attached.
  ///
  /// Layouts may overlay each other's memory, and pages of several layouts may share a slot of the
  /// pool: with more than one layout, a copy writes no byte outside of its page. The pages of an
  /// only layout have their slots to themselves.
  /// Errors: kInvalidArgument without a layout, a pool or a sink; kInvalidArgument, kRefused or kIo
  /// with the device's detail; the device is then not attached.
  virtual Result<void> attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                              CompletionSink sink) = 0;
  /// The same with one layout.
  Result<void> attach(const PageLayout& layout, std::span<std::byte> pool, CompletionSink sink) {
    return attach(std::span(&layout, 1), pool, std::move(sink));
  }

  /// Ends the use of the pool: cancels queued batches, waits for copies in flight, however long
  /// that takes, and delivers all completions. Afterwards nothing touches the pool. Idempotent.
  virtual void detach() = 0;

  /// The memory of a layout, as other processes name it to their add_peer(): those of this host,
  /// and those of others if the device has a network. These also read `guards`, which stay where
  /// they are until unshare().
  /// Errors: kRefused with the reason when they cannot read it.
  virtual Result<PeerMemory> share(const PageLayout& layout, std::span<std::byte> guards);

  /// Ends what share() has allowed to processes of other hosts: when it returns, they read neither
  /// the engine's blocks nor the guards, whose memory may end then. Not while attached. The device
  /// shares nothing afterwards. Idempotent.
  virtual void unshare() {}

  /// Lets batches read the memory of another engine, under a name that the caller chooses.
  ///
  /// A page counts as copied when its bytes were read while the peer's process ran. The device does
  /// not detect that the peer wrote to them at the same time: the caller does. Batches that read a
  /// process that has ended complete with kGone, and with kRefused when the kernel forbids it.
  /// Errors: kRefused when the device or the kernel cannot read that process's memory, or when its
  /// segments differ in number or size from those of layout 0; kInvalidArgument for the name 0, a
  /// name in use, or addresses out of range; kGone when the device is not attached or the process
  /// has ended; kIo when the memory is not readable.
  virtual Result<void> add_peer(std::uint64_t peer, const PeerMemory& memory);

  /// Forgets a peer; detach() forgets all. The caller guarantees that no batch that reads the peer
  /// is in flight. Unknown names are fine.
  virtual void remove_peer(std::uint64_t /*peer*/) {}

  /// Marks the engine's work on `queue` so far. Cheap; never waits.
  /// Errors: kInternal when the device is broken: the caller then drops its save.
  virtual Result<Event> record_event(Queue queue) = 0;

  /// Accepts a batch; one without copies completes once `after` is over. Errors: kBusy when its
  /// queue is full, which a reported batch has left, kGone when not attached, kInvalidArgument for
  /// a layout, a block or an offset out of range, an unknown peer or one of a save, kInternal once
  /// the device is broken.
  virtual Result<void> submit(Batch batch) = 0;

  /// Requests the early completion of a load, for devices that queue their work like the engine
  /// does. If all copies of the batch are queued and are expected to end `within` this time, work
  /// that the engine queues on `queue` from now on waits for them. Returns true in that case: such
  /// work finds the loaded blocks complete. The batch still completes later, as always. Returns
  /// false when the batch is not that far, unknown or over, or when the device does not support
  /// this. May be called from any thread and never waits.
  /// Errors: kInternal when the device is broken.
  virtual Result<bool> complete_early(std::uint64_t /*ticket*/, Queue /*queue*/,
                                      Duration /*within*/) {
    return false;
  }

  /// Copies no further page of the batch; it completes as soon as its pages in flight have ended.
  /// Unknown tickets are fine.
  virtual void cancel(std::uint64_t ticket) = 0;
};

inline Result<PeerMemory> Device::share(const PageLayout& layout, std::span<std::byte> /*guards*/) {
  return PeerMemory{.segments = {layout.segments().begin(), layout.segments().end()},
                    .block_count = layout.block_count()};
}

inline Result<void> Device::add_peer(std::uint64_t peer, const PeerMemory& /*memory*/) {
  return fail(Errc::kRefused, "peer {}: this device cannot read the memory of other processes",
              peer);
}

}  // namespace pegaflow
