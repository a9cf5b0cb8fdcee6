#include "transport/network_device.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include "transport/device_checks.h"
#include "transport/network_plan.h"
#include "transport/network_reads.h"

namespace pegaflow {
namespace {

/// An engine has one array of guards for each of its sessions with a server at a time.
constexpr std::size_t kMostGuardArrays = 16;

tl::unexpected<Error> forked_error() {
  return fail(Errc::kGone, "the network thread belongs to the parent process");
}

}  // namespace

/// Its mutex guards the regions and the peers, and is held while a batch is planned and posted.
/// What goes to the other device alone does not take it, except for a look at the peer.
class NetworkDevice::Impl {
 public:
  explicit Impl(std::shared_ptr<Device> inner) : inner_(std::move(inner)) {}

  Result<void> start(const PageLayout& layout, const MakeFabric& make, const Clock& clock,
                     const Options& options) {
    PEGA_TRY_LET(const std::vector<std::span<std::byte>> extents,
                 network::extents_of(layout, options.kind));
    kind_ = options.kind;
    if (extents.size() > options.max_regions) {
      return fail(Errc::kRefused,
                  "the memory of the engine's blocks consists of {} ranges, and the network "
                  "registers {} at most",
                  extents.size(), options.max_regions);
    }
    PEGA_TRY_LET(reads_,
                 network::Reads::create({.patience = options.patience,
                                         .max_reads = options.max_batches,
                                         .guards_first = options.mistakes.reads_guards_first,
                                         .show_bytes = options.show_bytes},
                                        make, clock));
    for (const std::span<std::byte> extent : extents) {
      Memory memory(extent);
      memory.kind = options.kind;
      memory.device = options.gpu;
      PEGA_TRY_LET(const RegionId region, lend(memory));
      regions_.push_back({extent, region});
    }
    return {};
  }

  Result<void> attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                      CompletionSink sink) {
    if (forked()) return fail(Errc::kRefused, "the network thread belongs to the parent process");
    PEGA_TRY(device::check_attach(layouts, pool, sink));
    const std::lock_guard lock(mutex_);
    if (layout_) return fail(Errc::kInvalidArgument, "the device is attached already");
    PEGA_TRY_LET(std::vector<NetworkMemory::Place> places,
                 network::places_of(layouts.front(), regions_));
    PEGA_TRY(inner_->attach(layouts, pool, sink));
    layout_ = layouts.front();
    places_ = std::move(places);
    sink_ = std::make_shared<const CompletionSink>(std::move(sink));
    return {};
  }

  void detach() {
    if (forked()) return inner_->detach();
    {
      const std::lock_guard lock(mutex_);
      layout_.reset();
    }
    reads_->cancel_all();
    inner_->detach();
    reads_->wait_until_idle();
    Peers ended;
    {
      const std::lock_guard lock(mutex_);
      if (!layout_) ended.swap(peers_);
    }
    for (const auto& [name, peer] : ended) {
      if (peer) disconnect(peer->id);
    }
  }

  Result<PeerMemory> share(const PageLayout& layout, std::span<std::byte> guards) {
    if (forked()) return fail(Errc::kRefused, "the network belongs to the parent process");
    Result<PeerMemory> shared = inner_->share(layout, guards);
    if (guards.empty()) return shared;
    if (!shared) {
      // Without handles a GPU's addresses would be taken for ordinary memory.
      if (shared.error().code != Errc::kRefused || kind_ == MemoryKind::kCuda) return shared;
      shared = PeerMemory{.segments = {layout.segments().begin(), layout.segments().end()},
                          .block_count = layout.block_count()};
    }
    const std::lock_guard lock(mutex_);
    PEGA_TRY_LET(std::vector<NetworkMemory::Place> places, network::places_of(layout, regions_));
    PEGA_TRY_LET(const RegionId guard_region, lend_guards(guards));
    shared->network = NetworkMemory{.fabric = reads_->fabric().describe(),
                                    .segments = std::move(places),
                                    .guards = guard_region};
    return shared;
  }

  void unshare() {
    if (forked()) return;
    inner_->unshare();
    const std::lock_guard lock(mutex_);
    for (std::vector<network::LocalRegion>* const shared : {&guards_, &regions_}) {
      for (const network::LocalRegion& each : *shared) {
        reads_->fabric().unregister_region(each.region);
      }
      shared->clear();
    }
  }

  Result<void> add_peer(std::uint64_t name, const PeerMemory& memory) {
    const bool on_another_host = device::is_on_another_host(memory);
    if (forked()) return on_another_host ? forked_error() : inner_->add_peer(name, memory);
    std::unique_lock lock(mutex_);
    if (!layout_) return fail(Errc::kGone, "add peer: the device is not attached to a pool");
    if (name == 0 || peers_.contains(name)) {
      return fail(Errc::kInvalidArgument, "add peer: {} is 0 or the name of another peer", name);
    }
    if (on_another_host) {
      PEGA_TRY_LET(network::RemoteBlocks blocks, network::remote_blocks(memory, *layout_));
      PEGA_TRY_LET(const Fabric::PeerId id, reads_->fabric().connect(memory.network->fabric));
      peers_.emplace(name, Peer{id, std::move(blocks)});
      return {};
    }
    // The name is taken while the other device looks at the peer, which may last.
    peers_.emplace(name, std::nullopt);
    lock.unlock();
    Result<void> added = inner_->add_peer(name, memory);
    if (added) return added;
    lock.lock();
    peers_.erase(name);
    return added;
  }

  void remove_peer(std::uint64_t name) {
    if (forked()) return inner_->remove_peer(name);
    std::optional<Peer> peer;
    {
      const std::lock_guard lock(mutex_);
      Peers::node_type found = peers_.extract(name);
      if (!found.empty()) peer = std::move(found.mapped());
    }
    if (peer) return disconnect(peer->id);
    inner_->remove_peer(name);
  }

  Result<void> submit(Batch&& batch) {
    if (batch.peer == 0) return inner_->submit(std::move(batch));
    if (forked()) return forked_error();
    {
      const std::lock_guard lock(mutex_);
      const auto found = peers_.find(batch.peer);
      if (found != peers_.end() && found->second) return read(batch, *found->second);
    }
    return inner_->submit(std::move(batch));
  }

  void cancel(std::uint64_t ticket) {
    if (forked() || !reads_->cancel(ticket)) inner_->cancel(ticket);
  }

  [[nodiscard]] Device& inner() const noexcept { return *inner_; }
  [[nodiscard]] bool forked() const noexcept { return ::getpid() != pid_; }

 private:
  /// A peer on another host.
  struct Peer {
    Fabric::PeerId id{};
    network::RemoteBlocks blocks;
  };
  /// No value: a peer of the other device.
  using Peers = std::map<std::uint64_t, std::optional<Peer>>;

  Result<RegionId> lend(const Memory& memory) {
    PEGA_TRY_LET(const RegionId region, reads_->fabric().register_region(memory));
    PEGA_TRY(reads_->fabric().lend(region, TimePoint::max()));
    return region;
  }

  Result<RegionId> lend_guards(std::span<std::byte> guards) {
    const auto same = [&](const network::LocalRegion& known) {
      return known.memory.data() == guards.data() && known.memory.size() == guards.size();
    };
    const auto known = std::ranges::find_if(guards_, same);
    if (known != guards_.end()) return known->region;
    const auto address = std::bit_cast<std::uintptr_t>(guards.data());
    if (address % network::kGuardBytes != 0 || guards.size() % network::kGuardBytes != 0) {
      return fail(Errc::kInvalidArgument, "share: {} bytes of guards at {:#x} are not 64-bit words",
                  guards.size(), address);
    }
    if (guards_.size() == kMostGuardArrays) {
      return fail(Errc::kOutOfCapacity, "share: {} arrays of guards are shared already",
                  guards_.size());
    }
    PEGA_TRY_LET(const RegionId region, lend(guards));
    guards_.push_back({guards, region});
    return region;
  }

  Result<void> read(Batch& batch, const Peer& peer) {
    if (!layout_) return fail(Errc::kGone, "the device is not attached to a pool");
    PEGA_TRY(device::check_peer_batch(batch, *layout_, peer.blocks.block_count));
    if (batch.after != Event::kNow) {
      return fail(Errc::kInvalidArgument,
                  "batch {}: a read from another host cannot wait for event {}", batch.ticket,
                  static_cast<std::uint64_t>(batch.after));
    }
    for (const Copy& copy : batch.copies) {
      if (!copy.checksum) continue;
      return fail(Errc::kInvalidArgument,
                  "batch {}: block {} is read from another host, without a checksum", batch.ticket,
                  copy.block);
    }
    for (const std::uint32_t guard : batch.guards) {
      if (guard < peer.blocks.guard_count) continue;
      return fail(Errc::kInvalidArgument, "batch {}: guard {} of {} of peer {}", batch.ticket,
                  guard, peer.blocks.guard_count, batch.peer);
    }
    return reads_->start(
        {.ticket = batch.ticket,
         .peer = peer.id,
         .pages = network::plan_pages(batch.copies, *layout_, places_, peer.blocks),
         .guard_region = peer.blocks.guards,
         .guards = std::move(batch.guards),
         .sink = sink_});
  }

  /// It may not fail. The fabric's thread empties its queue in every case, so it is retried.
  void disconnect(Fabric::PeerId peer) {
    while (!reads_->fabric().disconnect(peer)) std::this_thread::yield();
  }

  const std::shared_ptr<Device> inner_;
  const pid_t pid_ = ::getpid();
  MemoryKind kind_ = MemoryKind::kHost;
  std::unique_ptr<network::Reads> reads_;
  std::vector<network::LocalRegion> regions_;  ///< Those of the engine's blocks.

  std::mutex mutex_;
  std::vector<network::LocalRegion> guards_;
  std::optional<PageLayout> layout_;  ///< Layout 0. No value: not attached.
  std::vector<NetworkMemory::Place> places_;
  std::shared_ptr<const CompletionSink> sink_;
  Peers peers_;
};

Result<std::unique_ptr<NetworkDevice>> NetworkDevice::create(std::shared_ptr<Device> inner,
                                                             const PageLayout& layout,
                                                             const MakeFabric& make,
                                                             const Clock& clock,
                                                             const Options& options) {
  auto impl = std::make_unique<Impl>(std::move(inner));
  PEGA_TRY(impl->start(layout, make, clock, options));
  return std::unique_ptr<NetworkDevice>(new NetworkDevice(std::move(impl)));
}

NetworkDevice::NetworkDevice(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
NetworkDevice::~NetworkDevice() {
  // In a child the threads of device and fabric are missing, and joining them would never return:
  // the process's end releases the memory.
  if (impl_->forked()) {
    static_cast<void>(impl_.release());
  } else {
    impl_->detach();
  }
}

Result<void> NetworkDevice::attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                                   CompletionSink sink) {
  return impl_->attach(layouts, pool, std::move(sink));
}
void NetworkDevice::detach() { impl_->detach(); }
Result<PeerMemory> NetworkDevice::share(const PageLayout& layout, std::span<std::byte> guards) {
  return impl_->share(layout, guards);
}
void NetworkDevice::unshare() { impl_->unshare(); }
Result<void> NetworkDevice::add_peer(std::uint64_t peer, const PeerMemory& memory) {
  return impl_->add_peer(peer, memory);
}
void NetworkDevice::remove_peer(std::uint64_t peer) { impl_->remove_peer(peer); }
Result<Device::Event> NetworkDevice::record_event(Queue queue) {
  return impl_->inner().record_event(queue);
}
Result<void> NetworkDevice::submit(Batch batch) { return impl_->submit(std::move(batch)); }
Result<bool> NetworkDevice::complete_early(std::uint64_t ticket, Queue queue, Duration within) {
  return impl_->inner().complete_early(ticket, queue, within);
}
void NetworkDevice::cancel(std::uint64_t ticket) { impl_->cancel(ticket); }

}  // namespace pegaflow
