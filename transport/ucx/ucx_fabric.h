#pragma once
/// \file
/// The Fabric over RDMA: UCX, with one rail per card.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "transport/fabric.h"

namespace pegaflow {

/// The RDMA lane: the reader's card reads the owner's memory without the owner's processor.
///
/// Each card (a *rail*) has a thread. Batches are cut into GETs of up to `piece_bytes`, and a rail
/// takes the next one when its window has room. Operations of a broken path go to the other rails;
/// a peer is lost when no rail reaches it.
///
/// Cancelled and late batches complete at once, and are quiesced when the card no longer writes to
/// their places. The owner does not see reads. A lease is a promise that the reader requests and
/// keeps by its own clock, and that the owner can revoke (lend(), unregister_region()): the owner
/// then waits until the reader confirms that its card has stopped, at most `fence_timeout`, and
/// cuts the reader off after that.
///
/// A process with the description of a fabric can read all registered memory, lent or not, if it
/// ignores this protocol: give the description only to peers. Nothing is encrypted.
///
/// Memory of GPUs can be registered where UCX and the card support it. Reads out of it and into it
/// are the card's own, or fail; over sockets UCX copies it through host memory.
///
/// Environment variables UCX_* override our settings. UCX is loaded at run time, once per process.
///
/// Thread-safe. Limits are those of Options; beyond them calls return kBusy.
class UcxFabric final : public Fabric {
 public:
  struct Options {
    std::vector<std::string> rails;  ///< Cards and ports, "mlx5_0:1"; 1 to 64.
    std::string library{};           ///< The file of libucp; empty: the installed one.
    /// For tests: UCX over TCP, where `rails` are network interfaces ("lo"). Every machine that
    /// reaches the interface can then read all memory of this process.
    bool sockets = false;
    /// The GPU whose memory may be registered; its context outlives the fabric. Made current on
    /// each rail's thread, before that opens UCX. Empty: memory of GPUs is refused, and UCX uses
    /// none; over TCP it then cannot read such memory of peers either. UCX before 1.19 supports one
    /// GPU in a process.
    std::optional<GpuContext> gpu{};
    std::size_t piece_bytes = std::size_t{1} << 20;    ///< The largest GET; 4 KiB to 1 GiB.
    std::size_t window_bytes = std::size_t{16} << 20;  ///< In flight per peer and rail.
    /// GETs in flight per peer and rail. Less than the 256 of a card's queue: when that is full, a
    /// cancel has to wait for the network.
    std::size_t window_operations = 192;
    Duration connect_timeout = std::chrono::seconds(3);  ///< Until a path is up and welcomed.
    Duration stall_timeout = std::chrono::seconds(2);    ///< For a peer that owes a response.
    Duration fence_timeout = std::chrono::seconds(1);    ///< For a reader to confirm a revocation.
    Duration spin = std::chrono::microseconds(20);  ///< While GETs are in flight, before sleeping.
    std::size_t batches = 1024;                     ///< Accepted and not quiesced.
    std::size_t chunks = 65536;                     ///< Per batch.
    std::size_t peers = 256;                        ///< Connected by this node.
    std::size_t readers = 1024;                     ///< Paths of peers to this node, per rail.
  };

  /// Opens the cards and starts their threads. `sink` receives completions, on one thread at a
  /// time; `clock` outlives the fabric. Make the first call in a process before other threads read
  /// the environment.
  /// Errors: kInvalidArgument when an option is out of its range; kRefused when this program was
  /// built without UCX, UCX is not installed, the named library cannot be used, or it does not know
  /// the card; those of GpuContext::make_current; UCX's own; kInternal when no thread can be
  /// started.
  static Result<std::unique_ptr<UcxFabric>> create(const Options& options, const Clock& clock,
                                                   CompletionSink sink);
  ~UcxFabric() override;
  UcxFabric(const UcxFabric&) = delete;
  UcxFabric& operator=(const UcxFabric&) = delete;

  /// A loaded UCX.
  struct Library {
    std::string version;  ///< "1.13.1"
    std::string file;     ///< "/usr/lib/x86_64-linux-gnu/libucp.so.0"
  };
  /// Loads UCX: the file `name`, or the installed one if it is empty. A process has one UCX: later
  /// calls, also by create(), have to name the same. Errors: kRefused, as create().
  static Result<Library> load_library(const std::string& name);

  Result<RegionId> register_region(const Memory& memory) override;
  Result<void> lend(RegionId region, TimePoint until) override;
  void unregister_region(RegionId region) override;
  [[nodiscard]] FabricDescriptor describe() const override;
  Result<PeerId> connect(const FabricDescriptor& peer) override;
  Result<void> disconnect(PeerId peer) override;
  Result<void> read(Batch batch) override;
  Result<void> cancel(std::uint64_t ticket) override;

 private:
  struct Parts;
  UcxFabric(const Options& options, CompletionSink sink);
  Result<void> start(const Clock& clock);
  void deliver();
  void nudge_all();

  const Options options_;
  const CompletionSink sink_;
  const Id128 incarnation_ = Id128::random();
  std::mutex delivery_mutex_;  // Delivers completions one by one, in the dealer's order.
  std::atomic<std::size_t> open_batches_{0};
  std::atomic<std::size_t> open_peers_{0};
  std::atomic<std::uint32_t> last_peer_{0};
  std::unique_ptr<Parts> parts_;  // All state that uses UCX.
};

}  // namespace pegaflow
