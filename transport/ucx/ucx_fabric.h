#pragma once
/// \file
/// The Fabric over RDMA: UCX, one rail a card.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "transport/fabric.h"

namespace pegaflow {

/// The RDMA lane: the reader's card fetches from the owner's memory, and the owner's processor has
/// no part in it.
///
/// Each card (a *rail*) has a thread. Batches are cut into GETs of up to `piece_bytes`, and a rail
/// takes the next one when its window has room. What a way that broke leaves undone goes to the
/// other rails; a peer is lost when no rail reaches it.
///
/// Cancelled and late batches are answered at once and settled when the card has done with their
/// places. The owner does not see who reads: a lease is a promise that the reader asked for and
/// keeps by its own clock, and that the owner can take back (lend(), unregister_region()): it then
/// waits until the reader says that its card is done, at most `fence_timeout`; then the reader is
/// cut off.
///
/// Who knows the description of a fabric can read what it has registered, lent or not, if he does
/// not keep to this: it is to be told to peers only. Nothing is encrypted.
///
/// Variables UCX_* of the environment win over what we set. UCX is found when the program runs.
///
/// Thread-safe. Limits are those of Options; beyond them the answer is kBusy.
class UcxFabric final : public Fabric {
 public:
  struct Options {
    std::vector<std::string> rails;  ///< Cards and ports, "mlx5_0:1"; 1 to 64.
    /// For tests: UCX over TCP, where `rails` are network interfaces ("lo"). Whoever reaches the
    /// interface can then make this process read any of its memory.
    bool sockets = false;
    std::size_t piece_bytes = std::size_t{1} << 20;    ///< Of a GET; 4 KiB to 1 GiB.
    std::size_t window_bytes = std::size_t{16} << 20;  ///< Under way to a peer, a rail.
    /// GETs under way to a peer, a rail. Less than the 256 of a card's queue: when that is full, a
    /// cancel has to wait for the network.
    std::size_t window_operations = 192;
    Duration connect_timeout = std::chrono::seconds(3);  ///< To be connected and welcomed.
    Duration stall_timeout = std::chrono::seconds(2);    ///< Of a peer that owes us something.
    Duration fence_timeout = std::chrono::seconds(1);    ///< Of a reader that is to stop.
    Duration spin = std::chrono::microseconds(20);  ///< While GETs are under way, before sleeping.
    std::size_t batches = 1024;                     ///< Accepted and not settled.
    std::size_t chunks = 65536;                     ///< Of one batch.
    std::size_t peers = 256;                        ///< Connected to.
    std::size_t readers = 1024;                     ///< Ways of others to us, a rail.
  };

  /// Opens the cards and starts their threads. `sink` hears of batches, on one thread at a time;
  /// `clock` outlives the fabric. The first call in a process is made before other threads read the
  /// environment.
  /// Errors: kInvalidArgument when an option is out of its range; kRefused when this program was
  /// built without UCX, or there is none, or it does not know the card; UCX's own; kInternal
  /// without a thread.
  static Result<std::unique_ptr<UcxFabric>> create(const Options& options, const Clock& clock,
                                                   CompletionSink sink);
  ~UcxFabric() override;
  UcxFabric(const UcxFabric&) = delete;
  UcxFabric& operator=(const UcxFabric&) = delete;

  /// Of the library on this machine: "1.13.1". Errors: kRefused, as create().
  static Result<std::string> library_version();

  Result<RegionId> register_region(std::span<std::byte> memory) override;
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
  std::mutex delivery_mutex_;  // One completion after the other, in the dealer's order.
  std::atomic<std::size_t> open_batches_{0};
  std::atomic<std::size_t> open_peers_{0};
  std::atomic<std::uint32_t> last_peer_{0};
  std::unique_ptr<Parts> parts_;  // All that knows of UCX.
};

}  // namespace pegaflow
