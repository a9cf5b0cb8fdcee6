#include "transport/sim/sim_fabric.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "transport/fabric_checks.h"

namespace pegaflow {
namespace {

constexpr std::string_view kBackend = "sim";
constexpr std::size_t kMostRegions = 1024;
constexpr std::size_t kBackgroundPart = 4;
/// The pause before a broken path is dialed again.
constexpr Duration kPause = std::chrono::milliseconds(1);

Id128 make_incarnation(std::mt19937_64& random) { return {random() | 1, random()}; }

}  // namespace

// ---- the start and the end

Result<std::unique_ptr<SimFabric>> SimFabric::create(const Options& options, SimNetwork& network,
                                                     CompletionSink sink) {
  PEGA_TRY(within<std::size_t>("the number of rails", options.rails_bytes_per_s.size(), 1, 64));
  for (const double rate : options.rails_bytes_per_s) PEGA_TRY(within("a rate", rate, 1.0, 1e15));
  PEGA_TRY(within<std::size_t>("piece_bytes", options.piece_bytes, 4096, std::size_t{1} << 30));
  PEGA_TRY(within<std::size_t>("window_bytes", options.window_bytes, options.piece_bytes,
                               std::size_t{1} << 36));
  PEGA_TRY(within<std::size_t>("window_operations", options.window_operations, 1, 255));
  PEGA_TRY(within<std::size_t>("batches", options.batches, 1, 1 << 20));
  PEGA_TRY(within<std::size_t>("chunks", options.chunks, 1, 1 << 24));
  PEGA_TRY(within<std::size_t>("peers", options.peers, 1, 65536));
  return std::unique_ptr<SimFabric>(new SimFabric(options, network, std::move(sink)));
}

SimFabric::SimFabric(const Options& options, SimNetwork& network, CompletionSink sink)
    : options_(options),
      network_(network),
      sink_(std::move(sink)),
      incarnation_([&network] {
        const std::lock_guard lock(network.mutex_);
        return make_incarnation(network.random_);
      }()),
      dealer_({.rails = options.rails_bytes_per_s.size(), .piece_bytes = options.piece_bytes},
              network.clock_) {
  for (const double rate : options.rails_bytes_per_s) rails_.push_back({.bytes_per_s = rate});
  const std::lock_guard lock(network_.mutex_);
  number_ = ++network_.last_fabric_;
  network_.fabrics_.emplace(number_, this);
}

SimFabric::~SimFabric() {
  const std::lock_guard lock(network_.mutex_);
  // From now on readers find no owner here.
  network_.fabrics_.erase(number_);
  dealer_.finish();
  finish_all();
  deliver();
}

void SimFabric::schedule(void (SimFabric::*act)(), TimePoint when) {
  network_.at(when, [&network = network_, number = number_, act] {
    if (SimFabric* const fabric = network.find(number)) (fabric->*act)();
  });
}

// ---- regions

Result<RegionId> SimFabric::register_region(const Memory& memory) {
  PEGA_TRY_LET(const std::span<std::byte> bytes, host_bytes(memory, kBackend));
  if (bytes.empty()) return fail(Errc::kInvalidArgument, "a region has at least one byte");
  const std::lock_guard lock(network_.mutex_);
  if (last_region_ == kMostRegions) {
    return fail(Errc::kOutOfCapacity, "{} regions were registered already", kMostRegions);
  }
  const RegionId region{last_region_++};
  regions_[static_cast<std::uint32_t>(region)] = {.memory = bytes};
  dealer_.add_region(region, bytes.size());
  return region;
}

Result<void> SimFabric::lend(RegionId region, TimePoint until) {
  const std::lock_guard lock(network_.mutex_);
  const auto found = regions_.find(static_cast<std::uint32_t>(region));
  if (found == regions_.end()) {
    return fail(Errc::kInvalidArgument, "there is no region {}",
                static_cast<std::uint32_t>(region));
  }
  found->second.until = until;
  if (until > network_.clock_.now()) return {};
  for (const auto& [number, fabric] : network_.fabrics_) fabric->fence(number_, region);
  return {};
}

void SimFabric::unregister_region(RegionId region) {
  const std::lock_guard lock(network_.mutex_);
  for (const auto& [number, fabric] : network_.fabrics_) fabric->fence(number_, region);
  finish_all();
  dealer_.close_region(region, [] {});
  regions_.erase(static_cast<std::uint32_t>(region));
  deliver();
}

void SimFabric::fence(std::uint64_t owner, RegionId region) {
  std::vector<std::uint64_t> ended;
  for (const auto& [number, read] : reads_) {
    if (read.fabric == owner && read.operation.remote_region == region) ended.push_back(number);
  }
  for (const std::uint64_t number : ended) {
    end_read(number, {.operation = {},
                      .kind = rails::Outcome::Kind::kFailed,
                      .error = Errc::kGone,
                      .detail = "the peer no longer lends the region"});
  }
  if (!ended.empty()) schedule(&SimFabric::iterate, network_.clock_.now());
}

FabricDescriptor SimFabric::describe() const {
  const std::lock_guard lock(network_.mutex_);
  FabricDescriptor descriptor{.backend = std::string(kBackend),
                              .incarnation = incarnation_,
                              .address = std::vector<std::byte>(sizeof number_),
                              .regions = {}};
  std::memcpy(descriptor.address.data(), &number_, sizeof number_);
  for (const auto& [number, region] : regions_) {
    descriptor.regions.push_back({.region = RegionId{number}, .size_bytes = region.memory.size()});
  }
  return descriptor;
}

// ---- peers

Result<Fabric::PeerId> SimFabric::connect(const FabricDescriptor& peer) {
  PEGA_TRY(check_peer(peer, kBackend, kMostRegions));
  Peer made{.incarnation = peer.incarnation, .paths = std::vector<Path>(rails_.size())};
  if (peer.address.size() != sizeof made.fabric) {
    return fail(Errc::kInvalidArgument, "the peer's address has {} bytes", peer.address.size());
  }
  std::memcpy(&made.fabric, peer.address.data(), sizeof made.fabric);
  const std::lock_guard lock(network_.mutex_);
  if (peers_.size() >= options_.peers) {
    return fail(Errc::kBusy, "{} peers are connected", options_.peers);
  }
  const PeerId id{++last_peer_};
  dealer_.add_peer(id, peer.regions);
  peers_.emplace(last_peer_, std::move(made));
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) greet(id, rail);
  return id;
}

void SimFabric::greet(PeerId id, std::size_t rail) {
  network_.at(
      network_.clock_.now() + options_.latency, [&network = network_, self = number_, id, rail] {
        SimFabric* const fabric = network.find(self);
        if (fabric == nullptr) return;
        const auto found = fabric->peers_.find(static_cast<std::uint32_t>(id));
        if (found == fabric->peers_.end() || found->second.paths[rail].is_open) return;
        const SimFabric* const other = network.find(found->second.fabric);
        if (network.is_cut(self, found->second.fabric) || other == nullptr) {
          fabric->break_path(id, rail, {Errc::kPeerLost, "the peer does not respond"}, false);
        } else if (other->incarnation_ != found->second.incarnation) {
          fabric->break_path(id, rail, {Errc::kGone, "the peer is another incarnation"}, true);
        } else {
          found->second.paths[rail].is_open = true;
          fabric->dealer_.path_up(id, rail);
        }
        fabric->iterate();
      });
}

void SimFabric::break_path(PeerId id, std::size_t rail, const Error& error, bool for_good) {
  const bool lost = dealer_.path_down(id, rail, error, for_good);
  const auto found = peers_.find(static_cast<std::uint32_t>(id));
  if (found == peers_.end()) return;
  found->second.paths[rail].is_open = false;
  if (lost) return;
  network_.at(network_.clock_.now() + kPause, [&network = network_, self = number_, id, rail] {
    if (SimFabric* const fabric = network.find(self)) fabric->greet(id, rail);
  });
}

Result<void> SimFabric::disconnect(PeerId peer) {
  const std::lock_guard lock(network_.mutex_);
  if (!dealer_.remove_peer(peer)) return {};
  peers_.erase(static_cast<std::uint32_t>(peer));
  schedule(&SimFabric::iterate, network_.clock_.now());
  return {};
}

// ---- batches

Result<void> SimFabric::read(Batch batch) {
  PEGA_TRY(check_size(batch, options_.chunks));
  const std::lock_guard lock(network_.mutex_);
  if (open_batches_ >= options_.batches) {
    return fail(Errc::kBusy, "{} batches are in flight", options_.batches);
  }
  ++open_batches_;
  dealer_.add(std::move(batch));
  schedule(&SimFabric::iterate, network_.clock_.now());
  return {};
}

Result<void> SimFabric::cancel(std::uint64_t ticket) {
  const std::lock_guard lock(network_.mutex_);
  dealer_.cancel(ticket);
  schedule(&SimFabric::iterate, network_.clock_.now());
  return {};
}

void SimFabric::iterate() {
  const TimePoint now = network_.clock_.now();
  if (iterate_at_ <= now) iterate_at_ = TimePoint::max();
  if (is_frozen()) return;  // The iteration at its end continues.
  // Outcomes of the cards come before deadlines, as in a process that was stopped.
  if (!outcomes_.empty()) dealer_.ended(std::exchange(outcomes_, {}));
  dealer_.on_time(now);
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) fill(rail);
  deliver();
  const TimePoint next = dealer_.next_time();
  if (next < iterate_at_) {
    iterate_at_ = next;
    schedule(&SimFabric::iterate, next);
  }
}

void SimFabric::deliver() {
  if (!outcomes_.empty()) dealer_.ended(std::exchange(outcomes_, {}));
  for (Completion& completion : dealer_.take_completions()) {
    if (completion.quiesced) --open_batches_;
    sink_(std::move(completion));
  }
}

void SimFabric::freeze(Duration time) {
  const std::lock_guard lock(network_.mutex_);
  frozen_until_ = std::max(frozen_until_, network_.clock_.now() + time);
  schedule(&SimFabric::iterate, frozen_until_);
}

// ---- what cards do

rails::Dealer::Room SimFabric::room(PeerId id, std::size_t rail) const {
  const auto found = peers_.find(static_cast<std::uint32_t>(id));
  if (found == peers_.end() || !found->second.paths[rail].is_open) return {};
  const Path& path = found->second.paths[rail];
  const auto left = [](auto limit, auto used) { return limit > used ? limit - used : 0; };
  return {
      .operations = left(options_.window_operations, path.operations),
      .bytes = left(options_.window_bytes, path.bytes),
      .background_operations = left(
          std::max<std::size_t>(options_.window_operations / kBackgroundPart, 1), path.background),
      .background_bytes =
          left(std::max(options_.window_bytes / kBackgroundPart, options_.piece_bytes),
               path.background_bytes)};
}

void SimFabric::fill(std::size_t rail) {
  const auto dealt = dealer_.deal(rail, [this, rail](PeerId id) { return room(id, rail); });
  for (const rails::Operation& operation : dealt) begin(rail, operation);
}

void SimFabric::begin(std::size_t rail, const rails::Operation& operation) {
  // room() was called for it a moment ago.
  Peer& peer = peers_.at(static_cast<std::uint32_t>(operation.peer));
  Path& path = peer.paths[rail];
  path.operations += 1;
  path.bytes += operation.size_bytes;
  if (operation.background) {
    path.background += 1;
    path.background_bytes += operation.size_bytes;
  }
  const TimePoint now = network_.clock_.now();
  const std::uint64_t number = ++last_read_;
  const Region& local = regions_.at(static_cast<std::uint32_t>(operation.local_region));
  Read& read = reads_[number];
  read = {.operation = operation,
          .fabric = peer.fabric,
          .place = local.memory.subspan(operation.local_offset, operation.size_bytes),
          .breaks = network_.chance(network_.faults_.broken),
          .is_corrupt = network_.chance(network_.faults_.corrupt)};

  Rail& card = rails_[rail];
  const TimePoint from = std::max(now, card.free_at);
  const Duration takes(static_cast<Duration::rep>(static_cast<double>(operation.size_bytes) /
                                                  card.bytes_per_s * 1e9));
  card.free_at = from + takes;
  Duration late = options_.latency;
  if (network_.chance(network_.faults_.slow)) late += network_.some(network_.faults_.slowest);
  schedule_read(number, from + late / 2 + takes / 2, &SimFabric::transfer_half);
  schedule_read(number, card.free_at + late, &SimFabric::finish);
}

void SimFabric::schedule_read(std::uint64_t read, TimePoint when,
                              void (SimFabric::*act)(std::uint64_t)) {
  network_.at(when, [&network = network_, self = number_, read, act] {
    SimFabric* const fabric = network.find(self);
    if (fabric != nullptr && fabric->reads_.contains(read)) (fabric->*act)(read);
  });
}

SimFabric::Reachability SimFabric::find_source(const Read& read, const Region*& source) const {
  if (network_.is_cut(number_, read.fabric)) return Reachability::kSilent;
  const SimFabric* const owner = network_.find(read.fabric);
  if (owner == nullptr) return Reachability::kBroken;
  const auto found = owner->regions_.find(static_cast<std::uint32_t>(read.operation.remote_region));
  if (found == owner->regions_.end()) return Reachability::kNoRegion;
  source = &found->second;
  return Reachability::kOpen;
}

bool SimFabric::transfer(Read& read, std::uint64_t up_to) const {
  const Region* source = nullptr;
  if (find_source(read, source) != Reachability::kOpen) return false;
  const auto from =
      source->memory.subspan(read.operation.remote_offset + read.done, up_to - read.done);
  std::memcpy(read.place.data() + read.done, from.data(), from.size());
  if (read.is_corrupt) read.place[read.done] ^= std::byte{1};
  read.done = up_to;
  return true;
}

void SimFabric::transfer_half(std::uint64_t number) {
  Read& read = reads_.at(number);
  (void)transfer(read, read.operation.size_bytes / 2);
}

void SimFabric::finish(std::uint64_t number) {
  Read& read = reads_.at(number);
  const Region* source = nullptr;
  const Reachability reachability = find_source(read, source);
  if (reachability == Reachability::kSilent && !read.breaks) {
    // The read ends only after the reader's stall timeout.
    read.breaks = true;
    schedule_read(number, network_.clock_.now() + options_.stall_timeout, &SimFabric::finish);
    return;
  }
  const PeerId peer = read.operation.peer;
  const std::size_t rail = read.operation.rail;
  const bool breaks =
      read.breaks || reachability == Reachability::kSilent || reachability == Reachability::kBroken;
  end_read(number, outcome_of(read, breaks));
  if (breaks) break_path(peer, rail, {Errc::kPeerLost, "the path to the peer broke"}, false);
  iterate();
}

rails::Outcome SimFabric::outcome_of(Read& read, bool breaks) const {
  using Kind = rails::Outcome::Kind;
  if (breaks)
    return {.operation = {}, .kind = Kind::kRetry, .detail = "its path to the peer broke"};
  const Region* source = nullptr;
  const bool is_lent =
      find_source(read, source) == Reachability::kOpen && network_.clock_.now() < source->until;
  // Bytes of a region that is not lent still arrive, and are discarded.
  if (!transfer(read, read.operation.size_bytes) || !is_lent) {
    return {.operation = {},
            .kind = Kind::kFailed,
            .error = Errc::kGone,
            .detail = "the peer does not lend the region"};
  }
  if (!read.is_corrupt) return {};
  return {.operation = {},
          .kind = Kind::kFailed,
          .error = Errc::kCorrupt,
          .detail = "its bytes differ from the peer's"};
}

void SimFabric::end_read(std::uint64_t number, rails::Outcome outcome) {
  const auto found = reads_.find(number);
  const rails::Operation& operation = found->second.operation;
  const auto peer = peers_.find(static_cast<std::uint32_t>(operation.peer));
  if (peer != peers_.end()) {
    Path& path = peer->second.paths[operation.rail];
    path.operations -= 1;
    path.bytes -= operation.size_bytes;
    if (operation.background) {
      path.background -= 1;
      path.background_bytes -= operation.size_bytes;
    }
  }
  if (outcome.kind == rails::Outcome::Kind::kDone) {
    rails_[operation.rail].transferred += operation.size_bytes;
  }
  outcome.operation = operation;
  outcomes_.push_back(std::move(outcome));
  reads_.erase(found);
}

void SimFabric::finish_all() {
  while (!reads_.empty()) {
    const std::uint64_t number = reads_.begin()->first;
    Read& read = reads_.begin()->second;
    const Region* source = nullptr;
    const Reachability reachability = find_source(read, source);
    end_read(number, outcome_of(read, read.breaks || reachability == Reachability::kSilent ||
                                          reachability == Reachability::kBroken));
  }
  for (Rail& rail : rails_) rail.free_at = network_.clock_.now();
  if (!outcomes_.empty()) dealer_.ended(std::exchange(outcomes_, {}));
}

// ---- what there is to see

bool SimFabric::is_written(std::span<const std::byte> place) const {
  const std::lock_guard lock(network_.mutex_);
  return std::any_of(reads_.begin(), reads_.end(), [&](const auto& entry) {
    const std::span<const std::byte> other = entry.second.place;
    return other.data() < place.data() + place.size() && place.data() < other.data() + other.size();
  });
}

std::size_t SimFabric::batches() const {
  const std::lock_guard lock(network_.mutex_);
  return open_batches_;
}

std::vector<std::uint64_t> SimFabric::bytes_by_rail() const {
  const std::lock_guard lock(network_.mutex_);
  std::vector<std::uint64_t> bytes;
  for (const Rail& rail : rails_) bytes.push_back(rail.transferred);
  return bytes;
}

}  // namespace pegaflow
