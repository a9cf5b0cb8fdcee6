#include "transport/ucx/ucx_fabric.h"

#include <algorithm>
#include <future>
#include <map>

#include "base/log.h"
#include "base/os/numa.h"
#include "transport/dealer.h"
#include "transport/fabric_checks.h"
#include "transport/ucx/nic.h"
#include "transport/ucx/rail.h"
#include "transport/ucx/ucp_api.h"
#include "transport/ucx/wire.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"ucx"};
constexpr std::string_view kBackend = "ucx";
/// The limit over the life of a fabric: the memory of a node is one region or a few.
constexpr std::size_t kMostRegions = 1024;

Result<void> check(const UcxFabric::Options& options) {
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kGibibyte = std::size_t{1} << 30;
  PEGA_TRY(within<std::size_t>("the number of rails", options.rails.size(), 1, ucx::kMostRails));
  PEGA_TRY(within<std::size_t>("piece_bytes", options.piece_bytes, kPage, kGibibyte));
  PEGA_TRY(within<std::size_t>("window_bytes", options.window_bytes, options.piece_bytes,
                               64 * kGibibyte));
  PEGA_TRY(within<std::size_t>("window_operations", options.window_operations, 1, 255));
  PEGA_TRY(within<std::size_t>("batches", options.batches, 1, 1 << 20));
  PEGA_TRY(within<std::size_t>("chunks", options.chunks, 1, 1 << 24));
  PEGA_TRY(within<std::size_t>("peers", options.peers, 1, 65536));
  PEGA_TRY(within<std::size_t>("readers", options.readers, 1, 65536));
  PEGA_TRY(within<std::int64_t>("spin, in ns,", options.spin.count(), 0, 1'000'000'000));
  for (const Duration timeout :
       {options.connect_timeout, options.stall_timeout, options.fence_timeout}) {
    PEGA_TRY(
        within<std::int64_t>("a timeout, in ns,", timeout.count(), 1'000'000, 3'600'000'000'000));
  }
  return {};
}

/// The cores beside the card; empty when the kernel does not know them or they are all of the
/// machine.
std::vector<std::uint32_t> cores_near(const std::string& device) {
  const auto node = ucx::numa_node_of(device);
  const NumaTopology topology = NumaTopology::read();
  for (const NumaNode& candidate : topology.nodes()) {
    if (node && candidate.number == *node && topology.nodes().size() > 1) return candidate.cores;
  }
  return {};
}

/// A promise that is fulfilled when `count` others are.
class Barrier {
 public:
  explicit Barrier(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      promises_.push_back(std::make_shared<std::promise<void>>());
    }
  }
  [[nodiscard]] const std::shared_ptr<std::promise<void>>& part(std::size_t i) const {
    return promises_[i];
  }
  void wait() {
    for (const auto& promise : promises_) promise->get_future().wait();
  }

 private:
  std::vector<std::shared_ptr<std::promise<void>>> promises_;
};

}  // namespace

struct UcxFabric::Parts {
  struct Region {
    std::uint64_t size_bytes = 0;
    TimePoint until = TimePoint::min();
    std::vector<std::byte> key;
    bool leaves = false;  ///< unregister_region() is in progress.
  };

  Parts(const ucx::UcpApi& ucp, const rails::Dealer::Options& options, const Clock& with)
      : api(ucp), clock(with), dealer(options, with) {}

  const ucx::UcpApi& api;
  const Clock& clock;
  rails::Dealer dealer;
  std::vector<std::unique_ptr<ucx::Rail>> rails;
  std::mutex regions_mutex;  // For callers only; not held while a rail is waited for.
  std::map<std::uint32_t, Region> regions;
  std::uint32_t last_region = 0;
};

// ---- the start and the end

Result<std::unique_ptr<UcxFabric>> UcxFabric::create(const Options& options, const Clock& clock,
                                                     CompletionSink sink) {
  PEGA_TRY(check(options));
  std::unique_ptr<UcxFabric> fabric(new UcxFabric(options, std::move(sink)));
  PEGA_TRY(fabric->start(clock));
  return fabric;
}

UcxFabric::UcxFabric(const Options& options, CompletionSink sink)
    : options_(options), sink_(std::move(sink)) {}

Result<void> UcxFabric::start(const Clock& clock) {
  PEGA_TRY_LET(const ucx::UcpApi* const api, ucx::UcpApi::load(options_.library));
  if (api->version() < 1014 && !options_.sockets) {
    kLog.warn(
        "this UCX may end the process when a peer dies during its greeting, use 1.14 or newer "
        "version={}",
        api->get_version_string());
  }
  parts_ = std::make_unique<Parts>(
      *api,
      rails::Dealer::Options{.rails = options_.rails.size(), .piece_bytes = options_.piece_bytes},
      clock);
  std::vector<std::unique_ptr<ucx::Rail>>& rails = parts_->rails;
  for (std::size_t i = 0; i < options_.rails.size(); ++i) {
    const std::string& device = options_.rails[i];
    PEGA_TRY_LET(
        auto rail,
        ucx::Rail::open(
            {.device = device,
             .sockets = options_.sockets,
             .gpu = options_.gpu,
             .peers = options_.peers,
             .spin = options_.spin,
             .cores = options_.sockets ? std::vector<std::uint32_t>() : cores_near(device),
             .requester = {.rail = i,
                           .device = device,
                           .operations = options_.window_operations,
                           .bytes = options_.window_bytes,
                           .piece_bytes = options_.piece_bytes,
                           .connect_timeout = options_.connect_timeout,
                           .stall_timeout = options_.stall_timeout},
             .responder = {.readers = options_.readers, .fence_timeout = options_.fence_timeout}},
            *api, incarnation_, parts_->dealer, clock,
            {.deliver = [this] { deliver(); },
             .nudge_others = [this] { nudge_all(); },
             .keeps_time = i == 0}));
    rails.push_back(std::move(rail));
  }
  return {};
}

UcxFabric::~UcxFabric() {
  if (!parts_) return;
  parts_->dealer.finish();
  // Rails nudge each other until the end, so all of them stop before one is destroyed.
  for (const auto& rail : parts_->rails) rail->stop();
  parts_->rails.clear();
  deliver();
}

Result<UcxFabric::Library> UcxFabric::load_library(const std::string& name) {
  PEGA_TRY_LET(const ucx::UcpApi* const api, ucx::UcpApi::load(name));
  return Library{.version = api->get_version_string(), .file = api->file};
}

void UcxFabric::deliver() {
  const std::lock_guard lock(delivery_mutex_);
  for (Completion& completion : parts_->dealer.take_completions()) {
    if (completion.quiesced) open_batches_.fetch_sub(1, std::memory_order_relaxed);
    sink_(std::move(completion));
  }
}

void UcxFabric::nudge_all() {
  for (const auto& rail : parts_->rails) rail->nudge();
}

// ---- regions

Result<RegionId> UcxFabric::register_region(const Memory& memory) {
  if (memory.bytes == 0) return fail(Errc::kInvalidArgument, "a region has at least one byte");
  std::uint32_t number = 0;
  {
    const std::lock_guard lock(parts_->regions_mutex);
    if (parts_->last_region == kMostRegions) {
      return fail(Errc::kOutOfCapacity, "{} regions were registered already", kMostRegions);
    }
    number = parts_->last_region++;
  }
  const RegionId region{number};
  ucx::RegionKey key{.base = reinterpret_cast<std::uintptr_t>(memory.base), .rail_keys = {}};
  std::vector<std::future<Result<std::vector<std::byte>>>> keys;
  // All cards at once: registration takes seconds for a large pool.
  for (const auto& rail : parts_->rails) keys.push_back(rail->map(region, memory));
  Result<void> mapped;
  for (auto& rail_key : keys) {
    auto got = rail_key.get();
    if (!got) {
      mapped = tl::unexpected<Error>(std::move(got.error()));
    } else {
      key.rail_keys.push_back(std::move(*got));
    }
  }
  if (!mapped) {
    for (const auto& rail : parts_->rails) rail->unmap(region).wait();
    return tl::unexpected<Error>(std::move(mapped.error()));
  }
  parts_->dealer.add_region(region, memory.bytes);
  const std::lock_guard lock(parts_->regions_mutex);
  parts_->regions[number] = {.size_bytes = memory.bytes, .key = pack(key)};
  return region;
}

Result<void> UcxFabric::lend(RegionId region, TimePoint until) {
  bool shorter = false;
  const std::size_t count = parts_->rails.size();
  Barrier ended(count);
  const bool over = until <= parts_->clock.now();
  {
    // Under the lock, so that two calls reach all rails in the same order.
    const std::lock_guard lock(parts_->regions_mutex);
    const auto found = parts_->regions.find(static_cast<std::uint32_t>(region));
    if (found == parts_->regions.end() || found->second.leaves) {
      return fail(Errc::kInvalidArgument, "there is no region {}",
                  static_cast<std::uint32_t>(region));
    }
    shorter = until < found->second.until;
    found->second.until = until;
    for (std::size_t i = 0; i < count; ++i) {
      parts_->rails[i]->lend(region, until, shorter || over, ended.part(i));
    }
  }
  if (over) ended.wait();
  return {};
}

void UcxFabric::unregister_region(RegionId region) {
  const auto number = static_cast<std::uint32_t>(region);
  {
    const std::lock_guard lock(parts_->regions_mutex);
    const auto found = parts_->regions.find(number);
    if (found != parts_->regions.end()) found->second.leaves = true;
  }
  // First local reads into it, then reads by peers from it. A call for an unknown region waits for
  // an iteration of the rails, too.
  parts_->dealer.close_region(region, [this] { nudge_all(); });
  std::vector<std::future<void>> unmapped;
  for (const auto& rail : parts_->rails) unmapped.push_back(rail->unmap(region));
  for (const auto& done : unmapped) done.wait();
  const std::lock_guard lock(parts_->regions_mutex);
  parts_->regions.erase(number);
}

FabricDescriptor UcxFabric::describe() const {
  ucx::FabricAddress address{.ucx_version = parts_->api.version(), .rails = {}};
  for (const auto& rail : parts_->rails) {
    address.rails.push_back({.device = rail->device(), .address = rail->address()});
  }
  FabricDescriptor descriptor{.backend = std::string(kBackend),
                              .incarnation = incarnation_,
                              .address = pack(address),
                              .regions = {}};
  const std::lock_guard lock(parts_->regions_mutex);
  for (const auto& [number, region] : parts_->regions) {
    if (region.leaves) continue;
    descriptor.regions.push_back(
        {.region = RegionId{number}, .size_bytes = region.size_bytes, .key = region.key});
  }
  return descriptor;
}

// ---- peers and batches

Result<Fabric::PeerId> UcxFabric::connect(const FabricDescriptor& peer) {
  PEGA_TRY(check_peer(peer, kBackend, kMostRegions));
  auto where = std::make_shared<ucx::PeerAddress>();
  PEGA_TRY_LET(where->address, ucx::unpack_address(peer.address));
  where->incarnation = peer.incarnation;
  const unsigned ours = parts_->api.version();
  // A version may not be able to unpack another version's keys.
  if (where->address.ucx_version != ours) {
    return fail(Errc::kRefused,
                "the peer has UCX {}.{} and this node {}.{}: install the same version on both",
                where->address.ucx_version / 1000, where->address.ucx_version % 1000, ours / 1000,
                ours % 1000);
  }
  for (const RegionDescriptor& region : peer.regions) {
    PEGA_TRY_LET(ucx::RegionKey key, ucx::unpack_key(region.key));
    if (key.rail_keys.size() != where->address.rails.size()) {
      return fail(Errc::kInvalidArgument,
                  "the peer's description has {} rails and a region with {} keys",
                  where->address.rails.size(), key.rail_keys.size());
    }
    where->regions[static_cast<std::uint32_t>(region.region)] = std::move(key);
  }
  if (open_peers_.fetch_add(1, std::memory_order_relaxed) >= options_.peers) {
    open_peers_.fetch_sub(1, std::memory_order_relaxed);
    return fail(Errc::kBusy, "{} peers are connected", options_.peers);
  }
  const PeerId id{last_peer_.fetch_add(1, std::memory_order_relaxed) + 1};
  parts_->dealer.add_peer(id, peer.regions);
  for (const auto& rail : parts_->rails) rail->connect(id, where);
  return id;
}

Result<void> UcxFabric::disconnect(PeerId peer) {
  if (!parts_->dealer.remove_peer(peer)) return {};
  open_peers_.fetch_sub(1, std::memory_order_relaxed);
  for (const auto& rail : parts_->rails) rail->disconnect(peer);
  nudge_all();
  return {};
}

Result<void> UcxFabric::read(Batch batch) {
  PEGA_TRY(check_size(batch, options_.chunks));
  if (open_batches_.fetch_add(1, std::memory_order_relaxed) >= options_.batches) {
    open_batches_.fetch_sub(1, std::memory_order_relaxed);
    return fail(Errc::kBusy, "{} batches are in flight", options_.batches);
  }
  parts_->dealer.add(std::move(batch));
  nudge_all();
  return {};
}

Result<void> UcxFabric::cancel(std::uint64_t ticket) {
  parts_->dealer.cancel(ticket);
  nudge_all();
  return {};
}

}  // namespace pegaflow
