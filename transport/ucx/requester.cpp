#include "transport/ucx/requester.h"

#include <algorithm>
#include <limits>

#include "base/log.h"
#include "transport/ucx/ucx_error.h"

namespace pegaflow::ucx {
namespace {

constexpr Log kLog{"ucx"};

/// Background work may take 1/4 of the window: what a foreground GET may have to wait for.
constexpr std::size_t kBackgroundPart = 4;
/// The pause before a broken path is dialed again, while others reach the peer.
constexpr Duration kFirstPause = std::chrono::seconds(1);
constexpr unsigned kMostDoublings = 6;
/// A lease is renewed this long before its end, which is also how long a posted GET has: enough for
/// a window of 16 MiB even at 17 MB/s. Leases used to their very end failed reads that arrived a
/// moment later.
constexpr Duration kRenewBefore = std::chrono::seconds(1);
/// The interval for checking closed paths whose callbacks are missing; UCX has no event for them.
constexpr Duration kClosingCheck = std::chrono::milliseconds(1);

/// The time `value` ns after `from`, saturated at the maximum.
TimePoint after(TimePoint from, std::int64_t value) {
  return value > (TimePoint::max() - from).count() ? TimePoint::max() : from + Duration(value);
}

}  // namespace

Requester::Requester(const Options& options, Worker& worker, const LocalRegions& regions,
                     Dealer& dealer, const Clock& clock)
    : options_(options),
      worker_(worker),
      regions_(regions),
      dealer_(dealer),
      clock_(clock),
      last_number_(Id128::random().low) {}

Requester::~Requester() = default;

// ---- paths

void Requester::connect(Fabric::PeerId id, std::shared_ptr<const PeerAddress> where) {
  Peer& peer = peers_[static_cast<std::uint32_t>(id)];
  peer.where = std::move(where);
  const auto& rails = peer.where->address.rails;
  // Rails of the same name first: in clusters where cards with the same number share a switch, only
  // those pairs are near each other.
  const auto same = std::find_if(rails.begin(), rails.end(), [this](const RailAddress& rail) {
    return rail.device == options_.device;
  });
  peer.remote_rail = same != rails.end() && rails.size() > 1
                         ? static_cast<std::size_t>(same - rails.begin())
                         : options_.rail % rails.size();
  dial(id, peer);
}

void Requester::dial(Fabric::PeerId id, Peer& peer) {
  const TimePoint now = clock_.now();
  auto path = std::make_unique<Path>();
  path->peer = id;
  path->where = peer.where;
  path->remote_rail = peer.remote_rail;
  path->number = ++last_number_;
  path->progress = now;
  auto endpoint = Endpoint::connect(worker_, peer.where->address.rails[peer.remote_rail].address);
  if (!endpoint) return break_path(id, peer, {Errc::kPeerLost, endpoint.error().detail}, false);
  path->endpoint = std::move(*endpoint);
  const Message hello{
      .kind = Message::Kind::kHello, .from = path->number, .incarnation = peer.where->incarnation};
  path->endpoint->send(hello, seal_hello(hello, worker_.address()));
  paths_[path->number] = path.get();
  peer.path = std::move(path);
  peer.state = Peer::State::kDialed;
  check_by(now + options_.connect_timeout);
}

void Requester::disconnect(Fabric::PeerId id) {
  const auto found = peers_.find(static_cast<std::uint32_t>(id));
  if (found == peers_.end()) return;
  if (found->second.path) drain_path(std::move(found->second.path));
  peers_.erase(found);
}

void Requester::drain_path(std::unique_ptr<Path> path) {
  for (auto& [number, region] : path->regions) {
    for (const Operation& operation : std::exchange(region.parked, {})) {
      give_back(*path, operation, {.kind = Outcome::Kind::kRetry, .detail = "its path was closed"});
    }
    region.requested_at.reset();
  }
  path->state =
      path->state == Path::State::kGreeting ? Path::State::kLeaving : Path::State::kDraining;
  draining_.push_back(std::move(path));
  check_by(clock_.now());
}

void Requester::close_drained(bool progressed, TimePoint now) {
  // Backwards, since elements are removed.
  for (std::size_t i = draining_.size(); i > 0; --i) {
    auto& path = draining_[i - 1];
    const bool done = path->state == Path::State::kDraining && path->posted == 0;
    if (!done && !check(*path, progressed, now)) continue;
    std::swap(path, draining_.back());
    close_path(std::move(draining_.back()));
    draining_.pop_back();
  }
}

void Requester::break_path(Fabric::PeerId id, Peer& peer, const Error& error, bool for_good) {
  kLog.debug("a path to a peer broke device={} peer={} reason={}", options_.device,
             static_cast<std::uint32_t>(id), to_string(error));
  // The dealer first: operations returned below then go to other rails, or their batches have
  // completed.
  const bool lost = dealer_.path_down(id, options_.rail, error, for_good);
  if (peer.path) close_path(std::move(peer.path));
  peer.state = lost ? Peer::State::kClosed : Peer::State::kPaused;
  if (lost) return;
  peer.redial_at = clock_.now() + kFirstPause * (1U << std::min(peer.breaks, kMostDoublings));
  ++peer.breaks;
  peer.remote_rail = (peer.remote_rail + 1) % peer.where->address.rails.size();
  check_by(peer.redial_at);
}

void Requester::close_path(std::unique_ptr<Path> path) {
  path->state = Path::State::kClosing;
  paths_.erase(path->number);
  for (auto& [number, region] : path->regions) {
    for (const Operation& operation : std::exchange(region.parked, {})) {
      give_back(*path, operation,
                {.kind = Outcome::Kind::kRetry, .detail = "its path to the peer broke"});
    }
  }
  path->endpoint->close(Endpoint::Close::kNow);
  closing_.push_back(std::move(path));
  check_by(clock_.now());
}

bool Requester::is_done(Path& path) {
  if (path.posted > 0 || !path.endpoint->closed()) return false;
  for (auto& [number, region] : path.regions) {
    if (region.key != nullptr) worker_.api().rkey_destroy(region.key);
  }
  return true;
}

// ---- operations

Dealer::Room Requester::room(Fabric::PeerId id) const {
  const auto found = peers_.find(static_cast<std::uint32_t>(id));
  if (found == peers_.end() || !found->second.path) return {};
  const Path& path = *found->second.path;
  if (path.state != Path::State::kOpen) return {};
  const auto left = [](auto limit, auto used) { return limit > used ? limit - used : 0; };
  return {.operations = left(options_.operations, path.taken),
          .bytes = left(options_.bytes, path.taken_bytes),
          .background_operations = left(
              std::max<std::size_t>(options_.operations / kBackgroundPart, 1), path.background),
          .background_bytes = left(std::max(options_.bytes / kBackgroundPart, options_.piece_bytes),
                                   path.background_bytes)};
}

bool Requester::fill() {
  more_room_ = false;
  const std::vector<Operation> dealt =
      dealer_.deal(options_.rail, [this](Fabric::PeerId id) { return room(id); });
  if (dealt.empty()) return false;
  const TimePoint now = clock_.now();
  for (const Operation& operation : dealt) {
    // room() was called for it a moment ago, on this thread.
    take(*peers_.at(static_cast<std::uint32_t>(operation.peer)).path, operation, now);
  }
  return true;
}

void Requester::take(Path& path, const Operation& operation, TimePoint now) {
  path.taken += 1;
  path.taken_bytes += operation.size_bytes;
  if (operation.background) {
    path.background += 1;
    path.background_bytes += operation.size_bytes;
  }
  const auto number = static_cast<std::uint32_t>(operation.remote_region);
  Region& region = path.regions[number];
  if (now < region.renew_at) return post(path, region, operation, now);
  region.parked.push_back(operation);
  if (region.requested_at) return;
  if (path.posted == 0) path.progress = now;
  region.requested_at = now;
  path.endpoint->send(
      {.kind = Message::Kind::kLeaseRequest, .to = path.remote_number, .region = number});
  check_by(now + options_.stall_timeout);
}

void Requester::give_back(Path& path, const Operation& operation, Outcome outcome) {
  path.taken -= 1;
  path.taken_bytes -= operation.size_bytes;
  if (operation.background) {
    path.background -= 1;
    path.background_bytes -= operation.size_bytes;
  }
  more_room_ = true;
  outcome.operation = operation;
  outcomes_.push_back(std::move(outcome));
}

void Requester::post(Path& path, Region& region, const Operation& operation, TimePoint now) {
  const UcpApi& api = worker_.api();
  const RegionKey& remote =
      path.where->regions.at(static_cast<std::uint32_t>(operation.remote_region));
  if (region.key == nullptr) {
    const ucs_status_t status = api.ep_rkey_unpack(
        path.endpoint->get(), remote.rail_keys[path.remote_rail].data(), &region.key);
    if (status != UCS_OK) {
      region.key = nullptr;
      return give_back(path, operation,
                       {.kind = Outcome::Kind::kFailed,
                        .error = Errc::kRefused,
                        .detail = ucx_error(api, status, "unpack a region's key").detail});
    }
  }
  // The dealer validated it, and unregistering a region waits for its operations.
  const LocalRegion& local = regions_.at(static_cast<std::uint32_t>(operation.local_region));
  if (free_.empty()) free_.push_back(&pool_.emplace_back());
  Posted* const posted = free_.back();
  free_.pop_back();
  *posted = {
      .requester = this, .path = &path, .lease_end = region.lease_end, .operation = operation};
  if (path.posted == 0) path.progress = now;
  path.posted += 1;
  region.open += 1;
  posted_count_ += 1;
  check_by(now + options_.stall_timeout);

  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                            UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                            UCP_OP_ATTR_FLAG_MULTI_SEND;
  parameters.cb.send = &Requester::on_done;
  parameters.user_data = posted;
  parameters.memh = local.handle;
  parameters.memory_type = ucx_type(local.memory.kind);
  const ucs_status_ptr_t request = api.get_nbx(
      path.endpoint->get(), local.memory.base + operation.local_offset, operation.size_bytes,
      remote.base + operation.remote_offset, region.key, &parameters);
  // No request: there will be no callback.
  if (request == nullptr) return finish(posted, UCS_OK);
  if (UCS_PTR_IS_ERR(request)) finish(posted, UCS_PTR_STATUS(request));
}

void Requester::on_done(void* request, ucs_status_t status, void* posted) {
  auto* const done = static_cast<Posted*>(posted);
  done->requester->worker_.api().request_free(request);
  done->requester->finish(done, status);
}

void Requester::finish(Posted* posted, ucs_status_t status) {
  Path& path = *posted->path;
  const Operation operation = posted->operation;
  const TimePoint now = clock_.now();
  free_.push_back(posted);
  posted_count_ -= 1;
  path.posted -= 1;
  path.progress = now;
  if (path.state == Path::State::kDraining && path.posted == 0) check_by(now);
  const auto number = static_cast<std::uint32_t>(operation.remote_region);
  Region& region = path.regions[number];
  region.open -= 1;
  if (status != UCS_OK) {
    if (path.state != Path::State::kClosing) path.endpoint->set_broken(status);
    give_back(path, operation,
              {.kind = Outcome::Kind::kRetry,
               .detail = ucx_error(worker_.api(), status, "read from the peer").detail});
    check_by(now);
  } else if (now > posted->lease_end) {
    give_back(path, operation,
              {.kind = Outcome::Kind::kFailed,
               .error = Errc::kGone,
               .detail = "its bytes arrived after the end of the lease"});
  } else {
    give_back(path, operation, {});
  }
  if (path.state != Path::State::kClosing) confirm(path, number, region);
}

bool Requester::report_outcomes() {
  if (outcomes_.empty()) return false;
  const std::vector<Outcome> outcomes = std::exchange(outcomes_, {});
  dealer_.ended(outcomes);
  return std::any_of(outcomes.begin(), outcomes.end(),
                     [](const Outcome& outcome) { return outcome.kind == Outcome::Kind::kRetry; });
}

// ---- messages of the peer

void Requester::on_message(const Message& message) {
  const auto found = paths_.find(message.to);
  if (found == paths_.end()) return;  // For a path that was closed meanwhile.
  Path& path = *found->second;
  path.progress = clock_.now();
  if (path.state == Path::State::kLeaving || path.state == Path::State::kDraining) {
    check_by(path.progress);
  }
  switch (message.kind) {
    case Message::Kind::kWelcome:
      return on_welcome(path, message);
    case Message::Kind::kLease:
      return on_lease(path, message);
    case Message::Kind::kRevoke: {
      Region& region = path.regions[message.region];
      region.lease_end = region.renew_at = TimePoint::min();
      region.revocation = message.value;
      return confirm(path, message.region, region);
    }
    case Message::Kind::kHello:
    case Message::Kind::kLeaseRequest:
    case Message::Kind::kRevoked:
      return;  // Not a holder's message.
  }
}

void Requester::confirm(Path& path, std::uint32_t number, Region& region) {
  if (!region.revocation || region.open > 0) return;
  path.endpoint->send({.kind = Message::Kind::kRevoked,
                       .to = path.remote_number,
                       .region = number,
                       .value = *std::exchange(region.revocation, std::nullopt)});
}

void Requester::on_welcome(Path& path, const Message& message) {
  if (path.state == Path::State::kLeaving) {
    path.state = Path::State::kDraining;
    path.remote_number = message.from;
    return;
  }
  if (path.state != Path::State::kGreeting) return;
  Peer& peer = peers_.at(static_cast<std::uint32_t>(path.peer));
  if (message.protocol != kProtocol || message.verdict == Message::Verdict::kRefused) {
    return break_path(path.peer, peer,
                      {Errc::kRefused, "the peer has another version of the lane's protocol"},
                      true);
  }
  if (message.verdict != Message::Verdict::kWelcome) {
    return break_path(path.peer, peer, {Errc::kGone, "the peer is another incarnation"}, true);
  }
  path.state = Path::State::kOpen;
  path.remote_number = message.from;
  peer.breaks = 0;
  more_room_ = true;
  dealer_.path_up(path.peer, options_.rail);
}

void Requester::on_lease(Path& path, const Message& message) {
  Region& region = path.regions[message.region];
  if (!region.requested_at) return;
  const TimePoint requested_at = *std::exchange(region.requested_at, std::nullopt);
  std::deque<Operation> parked = std::exchange(region.parked, {});
  if (message.value <= 0) {
    region.lease_end = region.renew_at = TimePoint::min();
    for (const Operation& operation : parked) {
      give_back(path, operation,
                {.kind = Outcome::Kind::kFailed,
                 .error = Errc::kGone,
                 .detail = "the peer does not lend the region"});
    }
    return;
  }
  region.lease_end = after(requested_at, message.value);
  // Half of a shorter lease: near the end of the owner's own lease, not every read may cause a
  // request.
  region.renew_at =
      region.lease_end - std::min(kRenewBefore, (region.lease_end - requested_at) / 2);
  const TimePoint now = clock_.now();
  for (const Operation& operation : parked) {
    if (now < region.lease_end) {
      post(path, region, operation, now);
    } else {
      give_back(path, operation,
                {.kind = Outcome::Kind::kFailed,
                 .error = Errc::kGone,
                 .detail = "the lease ended before it could be used"});
    }
  }
}

// ---- time

std::optional<Error> Requester::check(const Path& path, bool progressed, TimePoint now) {
  if (const auto broken = path.endpoint->broken()) {
    return Error{Errc::kPeerLost, ucx_error(worker_.api(), *broken, "the path to the peer").detail};
  }
  const bool awaits_lease =
      std::any_of(path.regions.begin(), path.regions.end(),
                  [](const auto& entry) { return entry.second.requested_at.has_value(); });
  const bool greeting = path.state == Path::State::kGreeting || path.state == Path::State::kLeaving;
  if (!greeting && !awaits_lease && path.posted == 0) return std::nullopt;
  const TimePoint due =
      path.progress + (greeting ? options_.connect_timeout : options_.stall_timeout);
  if (now < due) {
    check_by(due);
    return std::nullopt;
  }
  if (progressed) {  // Perhaps this process was stopped: handle what has arrived first.
    check_by(now + kClosingCheck);
    return std::nullopt;
  }
  return Error{Errc::kPeerLost,
               greeting ? "the peer does not respond" : "the peer stopped responding"};
}

void Requester::check_paths(bool progressed) {
  const TimePoint now = clock_.now();
  if (!worker_.take_break() && now < next_check_) return;
  next_check_ = TimePoint::max();
  std::vector<std::pair<std::uint32_t, Error>> broken;
  for (auto& [number, peer] : peers_) {
    if (peer.state == Peer::State::kDialed) {
      if (auto error = check(*peer.path, progressed, now)) broken.emplace_back(number, *error);
    } else if (peer.state == Peer::State::kPaused && peer.redial_at <= now) {
      dial(Fabric::PeerId{number}, peer);
    } else if (peer.state == Peer::State::kPaused) {
      check_by(peer.redial_at);
    }
  }
  for (const auto& [number, error] : broken) {
    Peer& peer = peers_.at(number);
    if (peer.path) break_path(Fabric::PeerId{number}, peer, error, false);
  }
  close_drained(progressed, now);
  std::erase_if(closing_, [this](const auto& path) { return is_done(*path); });
  if (!closing_.empty()) check_by(now + kClosingCheck);
}

// ---- the end

void Requester::close_all() {
  while (!peers_.empty()) disconnect(Fabric::PeerId{peers_.begin()->first});
}

bool Requester::all_closed() {
  std::erase_if(closing_, [this](const auto& path) { return is_done(*path); });
  return peers_.empty() && draining_.empty() && closing_.empty();
}

void Requester::worker_is_gone() {
  for (Posted& posted : pool_) {
    if (std::find(free_.begin(), free_.end(), &posted) != free_.end()) continue;
    outcomes_.push_back({.operation = posted.operation,
                         .kind = Outcome::Kind::kRetry,
                         .detail = "its card was closed"});
    free_.push_back(&posted);
  }
  closing_.clear();
}

}  // namespace pegaflow::ucx
