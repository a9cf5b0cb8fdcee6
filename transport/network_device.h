#pragma once
/// \file
/// Adds reads from the memory of engines on other hosts to a device.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/clock.h"
#include "base/error.h"
#include "base/page_layout.h"
#include "transport/device.h"
#include "transport/fabric.h"
#include "transport/memory.h"

namespace pegaflow {

/// A Device that reads peers on other hosts through a Fabric, and lets them read its engine's
/// blocks. Another device does everything else: what concerns the pool or peers on this host is
/// forwarded to it.
///
/// A peer is on another host if PeerMemory::network is set and PeerMemory::process is negative. A
/// batch that reads it is a load of layout 0 with the event kNow, and requests no checksums. Its
/// deadline at the fabric is Options::patience after it was accepted, and that much again for its
/// guards. It completes when the fabric has quiesced all of it, so nothing writes to its blocks
/// after its completion. A page counts as copied when all its bytes arrived intact; a batch that
/// lacks some completes with the error of the first one that is missing: kPeerLost, kTimeout,
/// kCancelled, kGone, kCorrupt, or kBusy when the fabric accepted only its first part.
///
/// The guards of a batch are read after all its bytes have arrived. If a guard then has the value
/// that it had before its owner gave away the block, and the owner changes the guard before it
/// changes the block, the reader has the guarded bytes.
///
/// Completions of such batches are delivered on a thread of this object, which sleeps while none is
/// due. Batches of the other device complete on its threads, possibly at the same time.
///
/// Thread-safe as Device. After a fork, in the child, reads from other hosts return kGone, and the
/// destructor returns at once.
class NetworkDevice final : public Device {
 public:
  /// Makes the fabric, whose completions go to the sink.
  using MakeFabric = std::function<Result<std::unique_ptr<Fabric>>(Fabric::CompletionSink)>;

  struct Options {
    /// Faults for tests of the callers' checks.
    struct Mistakes {
      bool reads_guards_first = false;  ///< Before the pages: guards then prove nothing.
    };

    Duration patience = std::chrono::seconds(5);  ///< For each of the two steps of a batch.
    std::size_t max_regions = 256;        ///< The ranges of the layout (network::extents_of()).
    std::size_t max_batches = 256;        ///< In flight, from other hosts; 1 to 1024.
    MemoryKind kind = MemoryKind::kHost;  ///< Kind of the blocks; guards are ordinary.
    int gpu = 0;                          ///< With kCuda: the GPU, by CUDA's number.
    /// If set, it runs before a batch is reported that brought bytes: a GPU's kernels may not see
    /// what a card has written before. Its error is that of the batch.
    std::function<Result<void>()> show_bytes{};
    Mistakes mistakes{};
  };

  /// Makes the fabric and lends it the memory of `layout`, the blocks of the engine, as long as
  /// this device lives. Other layouts lie in the same memory. `clock` outlives the device, and so
  /// does the memory. Errors: those of `make`, Fabric::register_region() and Fabric::lend();
  /// kRefused when the memory of the layout consists of too many regions; kInvalidArgument for an
  /// option or an address out of range; kInternal when no thread can be started.
  static Result<std::unique_ptr<NetworkDevice>> create(std::shared_ptr<Device> inner,
                                                       const PageLayout& layout,
                                                       const MakeFabric& make, const Clock& clock,
                                                       const Options& options);

  /// Calls detach(), then ends the fabric and the thread.
  ~NetworkDevice() override;

  using Device::attach;
  /// Errors: also kInvalidArgument when layout 0 is not in the memory that was lent.
  Result<void> attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                      CompletionSink sink) override;
  void detach() override;

  /// The result of the other device, with PeerMemory::network unless `guards` is empty. The guards
  /// are lent once, by the first call with them. If the other device refuses to share ordinary
  /// memory with processes of this host, the result is the layout's own segments: other hosts can
  /// read it, processes of this host cannot. Errors: also kInvalidArgument when the layout is not
  /// in the memory that was lent, or when `guards` are no array of 64-bit words; those of
  /// Fabric::register_region(); kOutOfCapacity for more than 16 arrays of guards.
  Result<PeerMemory> share(const PageLayout& layout, std::span<std::byte> guards) override;
  /// Waits for readers as Fabric::unregister_region() does. The blocks stay unregistered, so the
  /// device cannot be attached again.
  void unshare() override;

  /// Errors: also those of Fabric::connect(); kInvalidArgument when a block or the guards are
  /// outside of the regions that the peer describes.
  Result<void> add_peer(std::uint64_t peer, const PeerMemory& memory) override;
  void remove_peer(std::uint64_t peer) override;
  Result<Event> record_event(Queue queue) override;
  /// Errors: also those of Fabric::read(); kBusy for more than Options::max_batches.
  Result<void> submit(Batch batch) override;
  Result<bool> complete_early(std::uint64_t ticket, Queue queue, Duration within) override;
  void cancel(std::uint64_t ticket) override;

 private:
  class Impl;
  explicit NetworkDevice(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
