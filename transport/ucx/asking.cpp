#include "transport/ucx/asking.h"

#include <algorithm>
#include <limits>

#include "base/log.h"
#include "transport/ucx/ucx_error.h"

namespace pegaflow::ucx {
namespace {

constexpr Log kLog{"ucx"};

/// For what nobody waits for: what a GET of the foreground may have to wait for.
constexpr std::size_t kBackgroundPart = 4;
/// How long a broken way rests before it is tried again, while others reach the peer.
constexpr Duration kFirstPause = std::chrono::seconds(1);
constexpr unsigned kMostDoublings = 6;
/// A lease is asked for anew so long before its end: what is posted has this long to come, a whole
/// window of 16 MiB even at 17 MB/s. Used to its very end it failed reads that came a moment later.
constexpr Duration kRenewBefore = std::chrono::seconds(1);
/// A closed way whose callbacks have not come is looked at so often; UCX tells of no event then.
constexpr Duration kClosingCheck = std::chrono::milliseconds(1);

/// A time as far from `from` as `value` says, without running over the end.
TimePoint after(TimePoint from, std::int64_t value) {
  return value > (TimePoint::max() - from).count() ? TimePoint::max() : from + Duration(value);
}

}  // namespace

Asking::Asking(const Options& options, Worker& worker, const LocalRegions& regions, Dealer& dealer,
               const Clock& clock)
    : options_(options),
      worker_(worker),
      regions_(regions),
      dealer_(dealer),
      clock_(clock),
      last_number_(Id128::random().low) {}

Asking::~Asking() = default;

// ---- lanes

void Asking::connect(Fabric::PeerId id, std::shared_ptr<const PeerAddress> where) {
  Peer& peer = peers_[static_cast<std::uint32_t>(id)];
  peer.where = std::move(where);
  const auto& rails = peer.where->address.rails;
  // Rails of one name first: in clusters whose cards of one number share a switch, only those pairs
  // are near.
  const auto same = std::find_if(rails.begin(), rails.end(), [this](const RailAddress& rail) {
    return rail.device == options_.device;
  });
  peer.remote_rail = same != rails.end() && rails.size() > 1
                         ? static_cast<std::size_t>(same - rails.begin())
                         : options_.rail % rails.size();
  dial(id, peer);
}

void Asking::dial(Fabric::PeerId id, Peer& peer) {
  const TimePoint now = clock_.now();
  peer.redial_at.reset();
  auto lane = std::make_unique<Lane>();
  lane->peer = id;
  lane->where = peer.where;
  lane->remote_rail = peer.remote_rail;
  lane->number = ++last_number_;
  lane->progress = now;
  auto endpoint = Endpoint::connect(worker_, peer.where->address.rails[peer.remote_rail].address);
  if (!endpoint) return break_lane(id, peer, {Errc::kPeerLost, endpoint.error().detail}, false);
  lane->endpoint = std::move(*endpoint);
  const Message hello{
      .kind = Message::Kind::kHello, .from = lane->number, .incarnation = peer.where->incarnation};
  lane->endpoint->send(hello, seal_hello(hello, worker_.address()));
  lanes_[lane->number] = lane.get();
  peer.lane = std::move(lane);
  check_by(now + options_.connect_timeout);
}

void Asking::disconnect(Fabric::PeerId id) {
  const auto found = peers_.find(static_cast<std::uint32_t>(id));
  if (found == peers_.end()) return;
  if (found->second.lane) leave_lane(std::move(found->second.lane));
  peers_.erase(found);
}

void Asking::leave_lane(std::unique_ptr<Lane> lane) {
  for (auto& [number, region] : lane->regions) {
    for (const Operation& operation : std::exchange(region.parked, {})) {
      give_back(*lane, operation, {.kind = Outcome::Kind::kAgain, .detail = "it was left"});
    }
    region.asked.reset();
  }
  lane->state = Lane::State::kLeaving;
  leaving_.push_back(std::move(lane));
  check_by(clock_.now());
}

void Asking::look_after_leaving(bool progressed, TimePoint now) {
  // Backwards, since some go.
  for (std::size_t i = leaving_.size(); i > 0; --i) {
    auto& lane = leaving_[i - 1];
    const bool done = lane->theirs != 0 && lane->posted == 0;
    if (!done && !check(*lane, progressed, now)) continue;
    std::swap(lane, leaving_.back());
    close_lane(std::move(leaving_.back()));
    leaving_.pop_back();
  }
}

void Asking::break_lane(Fabric::PeerId id, Peer& peer, const Error& error, bool for_good) {
  kLog.debug("a way to a peer broke device={} peer={} reason={}", options_.device,
             static_cast<std::uint32_t>(id), to_string(error));
  // The dealer hears first: what comes back from here then goes to others, or is answered.
  const bool lost = dealer_.lane_down(id, options_.rail, error, for_good);
  if (peer.lane) close_lane(std::move(peer.lane));
  if (lost) return;
  peer.redial_at = clock_.now() + kFirstPause * (1U << std::min(peer.breaks, kMostDoublings));
  ++peer.breaks;
  peer.remote_rail = (peer.remote_rail + 1) % peer.where->address.rails.size();
  check_by(*peer.redial_at);
}

void Asking::close_lane(std::unique_ptr<Lane> lane) {
  lane->state = Lane::State::kClosing;
  lanes_.erase(lane->number);
  for (auto& [number, region] : lane->regions) {
    for (const Operation& operation : std::exchange(region.parked, {})) {
      give_back(*lane, operation,
                {.kind = Outcome::Kind::kAgain, .detail = "its way to the peer broke"});
    }
  }
  lane->endpoint->close(Endpoint::Close::kNow);
  closing_.push_back(std::move(lane));
  check_by(clock_.now());
}

bool Asking::is_done(Lane& lane) {
  if (lane.posted > 0 || !lane.endpoint->closed()) return false;
  for (auto& [number, region] : lane.regions) {
    if (region.key != nullptr) worker_.api().rkey_destroy(region.key);
  }
  return true;
}

// ---- operations

Dealer::Room Asking::room(Fabric::PeerId id) const {
  const auto found = peers_.find(static_cast<std::uint32_t>(id));
  if (found == peers_.end() || !found->second.lane) return {};
  const Lane& lane = *found->second.lane;
  if (lane.state != Lane::State::kOpen) return {};
  const auto left = [](auto limit, auto used) { return limit > used ? limit - used : 0; };
  return {.operations = left(options_.operations, lane.taken),
          .bytes = left(options_.bytes, lane.taken_bytes),
          .background_operations = left(
              std::max<std::size_t>(options_.operations / kBackgroundPart, 1), lane.background),
          .background_bytes = left(std::max(options_.bytes / kBackgroundPart, options_.piece_bytes),
                                   lane.background_bytes)};
}

bool Asking::fill() {
  more_room_ = false;
  const std::vector<Operation> dealt =
      dealer_.deal(options_.rail, [this](Fabric::PeerId id) { return room(id); });
  if (dealt.empty()) return false;
  const TimePoint now = clock_.now();
  for (const Operation& operation : dealt) {
    // room() was asked for it a moment ago, on this thread.
    take(*peers_.at(static_cast<std::uint32_t>(operation.peer)).lane, operation, now);
  }
  return true;
}

void Asking::take(Lane& lane, const Operation& operation, TimePoint now) {
  lane.taken += 1;
  lane.taken_bytes += operation.size_bytes;
  if (operation.background) {
    lane.background += 1;
    lane.background_bytes += operation.size_bytes;
  }
  const auto number = static_cast<std::uint32_t>(operation.remote_region);
  Region& region = lane.regions[number];
  if (now < region.renew_at) return post(lane, region, operation, now);
  region.parked.push_back(operation);
  if (region.asked) return;
  if (lane.posted == 0) lane.progress = now;
  region.asked = now;
  lane.endpoint->send({.kind = Message::Kind::kAsk, .to = lane.theirs, .region = number});
  check_by(now + options_.stall_timeout);
}

void Asking::give_back(Lane& lane, const Operation& operation, Outcome outcome) {
  lane.taken -= 1;
  lane.taken_bytes -= operation.size_bytes;
  if (operation.background) {
    lane.background -= 1;
    lane.background_bytes -= operation.size_bytes;
  }
  more_room_ = true;
  outcome.operation = operation;
  outcomes_.push_back(std::move(outcome));
}

void Asking::post(Lane& lane, Region& region, const Operation& operation, TimePoint now) {
  const UcpApi& api = worker_.api();
  const RegionKey& remote =
      lane.where->regions.at(static_cast<std::uint32_t>(operation.remote_region));
  if (region.key == nullptr) {
    const ucs_status_t status = api.ep_rkey_unpack(
        lane.endpoint->get(), remote.rail_keys[lane.remote_rail].data(), &region.key);
    if (status != UCS_OK) {
      region.key = nullptr;
      return give_back(lane, operation,
                       {.kind = Outcome::Kind::kFailed,
                        .error = Errc::kRefused,
                        .detail = ucx_error(api, status, "unpack a region's key").detail});
    }
  }
  // The dealer saw it, and a region that goes waits for its operations.
  const LocalRegion& local = regions_.at(static_cast<std::uint32_t>(operation.local_region));
  if (free_.empty()) free_.push_back(&pool_.emplace_back());
  Posted* const posted = free_.back();
  free_.pop_back();
  *posted = {.asking = this, .lane = &lane, .lease_end = region.lease_end, .operation = operation};
  if (lane.posted == 0) lane.progress = now;
  lane.posted += 1;
  region.open += 1;
  posted_count_ += 1;
  check_by(now + options_.stall_timeout);

  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                            UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                            UCP_OP_ATTR_FLAG_MULTI_SEND;
  parameters.cb.send = &Asking::on_done;
  parameters.user_data = posted;
  parameters.memh = local.handle;
  parameters.memory_type = UCS_MEMORY_TYPE_HOST;
  const ucs_status_ptr_t request = api.get_nbx(
      lane.endpoint->get(), local.memory.data() + operation.local_offset, operation.size_bytes,
      remote.base + operation.remote_offset, region.key, &parameters);
  // No request: no callback comes.
  if (request == nullptr) return finish(posted, UCS_OK);
  if (UCS_PTR_IS_ERR(request)) finish(posted, UCS_PTR_STATUS(request));
}

void Asking::on_done(void* request, ucs_status_t status, void* posted) {
  auto* const done = static_cast<Posted*>(posted);
  done->asking->worker_.api().request_free(request);
  done->asking->finish(done, status);
}

void Asking::finish(Posted* posted, ucs_status_t status) {
  Lane& lane = *posted->lane;
  const Operation operation = posted->operation;
  const TimePoint now = clock_.now();
  free_.push_back(posted);
  posted_count_ -= 1;
  lane.posted -= 1;
  lane.progress = now;
  if (lane.state == Lane::State::kLeaving && lane.posted == 0) check_by(now);
  const auto number = static_cast<std::uint32_t>(operation.remote_region);
  Region& region = lane.regions[number];
  region.open -= 1;
  if (status != UCS_OK) {
    if (lane.state != Lane::State::kClosing) lane.endpoint->set_broken(status);
    give_back(lane, operation,
              {.kind = Outcome::Kind::kAgain,
               .detail = ucx_error(worker_.api(), status, "read from the peer").detail});
    check_by(now);
  } else if (now > posted->lease_end) {
    give_back(lane, operation,
              {.kind = Outcome::Kind::kFailed,
               .error = Errc::kGone,
               .detail = "the lease had ended when its bytes came"});
  } else {
    give_back(lane, operation, {});
  }
  if (lane.state != Lane::State::kClosing) confirm(lane, number, region);
}

bool Asking::tell_ended() {
  if (outcomes_.empty()) return false;
  const std::vector<Outcome> outcomes = std::exchange(outcomes_, {});
  dealer_.ended(outcomes);
  return std::any_of(outcomes.begin(), outcomes.end(),
                     [](const Outcome& outcome) { return outcome.kind == Outcome::Kind::kAgain; });
}

// ---- what the peer says

void Asking::on_message(const Message& message) {
  const auto found = lanes_.find(message.to);
  if (found == lanes_.end()) return;  // For a lane that was closed meanwhile.
  Lane& lane = *found->second;
  lane.progress = clock_.now();
  if (lane.state == Lane::State::kLeaving) check_by(lane.progress);
  switch (message.kind) {
    case Message::Kind::kWelcome:
      return on_welcome(lane, message);
    case Message::Kind::kLease:
      return on_lease(lane, message);
    case Message::Kind::kRevoke: {
      Region& region = lane.regions[message.region];
      region.lease_end = region.renew_at = TimePoint::min();
      region.revocation = message.value;
      return confirm(lane, message.region, region);
    }
    case Message::Kind::kHello:
    case Message::Kind::kAsk:
    case Message::Kind::kRevoked:
      return;  // Nothing that a holder says.
  }
}

void Asking::confirm(Lane& lane, std::uint32_t number, Region& region) {
  if (!region.revocation || region.open > 0) return;
  lane.endpoint->send({.kind = Message::Kind::kRevoked,
                       .to = lane.theirs,
                       .region = number,
                       .value = *std::exchange(region.revocation, std::nullopt)});
}

void Asking::on_welcome(Lane& lane, const Message& message) {
  if (lane.state == Lane::State::kLeaving) {
    lane.theirs = message.from;
    return;
  }
  if (lane.state != Lane::State::kGreeting) return;
  Peer& peer = peers_.at(static_cast<std::uint32_t>(lane.peer));
  if (message.protocol != kProtocol || message.verdict == Message::Verdict::kRefused) {
    return break_lane(lane.peer, peer,
                      {Errc::kRefused, "the peer speaks another version of the lane"}, true);
  }
  if (message.verdict != Message::Verdict::kWelcome) {
    return break_lane(lane.peer, peer, {Errc::kGone, "the peer is another incarnation"}, true);
  }
  lane.state = Lane::State::kOpen;
  lane.theirs = message.from;
  peer.breaks = 0;
  more_room_ = true;
  dealer_.lane_up(lane.peer, options_.rail);
}

void Asking::on_lease(Lane& lane, const Message& message) {
  Region& region = lane.regions[message.region];
  if (!region.asked) return;
  const TimePoint asked = *std::exchange(region.asked, std::nullopt);
  std::deque<Operation> parked = std::exchange(region.parked, {});
  if (message.value <= 0) {
    region.lease_end = region.renew_at = TimePoint::min();
    for (const Operation& operation : parked) {
      give_back(lane, operation,
                {.kind = Outcome::Kind::kFailed,
                 .error = Errc::kGone,
                 .detail = "the peer does not lend the region"});
    }
    return;
  }
  region.lease_end = after(asked, message.value);
  // Of what is shorter a half: near the end of what the peer lends not every read has a question.
  region.renew_at = region.lease_end - std::min(kRenewBefore, (region.lease_end - asked) / 2);
  const TimePoint now = clock_.now();
  for (const Operation& operation : parked) {
    if (now < region.lease_end) {
      post(lane, region, operation, now);
    } else {
      give_back(lane, operation,
                {.kind = Outcome::Kind::kFailed,
                 .error = Errc::kGone,
                 .detail = "the lease had ended before it could be used"});
    }
  }
}

// ---- time

std::optional<Error> Asking::check(const Lane& lane, bool progressed, TimePoint now) {
  if (const auto broken = lane.endpoint->broken()) {
    return Error{Errc::kPeerLost, ucx_error(worker_.api(), *broken, "the way to the peer").detail};
  }
  const bool asked = std::any_of(lane.regions.begin(), lane.regions.end(),
                                 [](const auto& entry) { return entry.second.asked.has_value(); });
  const bool greeting = lane.theirs == 0;
  if (!greeting && !asked && lane.posted == 0) return std::nullopt;
  const TimePoint due =
      lane.progress + (greeting ? options_.connect_timeout : options_.stall_timeout);
  if (now < due) {
    check_by(due);
    return std::nullopt;
  }
  if (progressed) {  // Perhaps it was we who were stopped: what is there is looked at first.
    check_by(now + kClosingCheck);
    return std::nullopt;
  }
  return Error{Errc::kPeerLost,
               greeting ? "the peer does not answer" : "the peer says nothing any more"};
}

void Asking::turn(bool progressed) {
  const TimePoint now = clock_.now();
  if (!worker_.take_break() && now < next_check_) return;
  next_check_ = TimePoint::max();
  std::vector<std::pair<std::uint32_t, Error>> broken;
  for (auto& [number, peer] : peers_) {
    if (peer.lane) {
      if (auto error = check(*peer.lane, progressed, now)) broken.emplace_back(number, *error);
    } else if (peer.redial_at && *peer.redial_at <= now) {
      dial(Fabric::PeerId{number}, peer);
    } else if (peer.redial_at) {
      check_by(*peer.redial_at);
    }
  }
  for (const auto& [number, error] : broken) {
    Peer& peer = peers_.at(number);
    if (peer.lane) break_lane(Fabric::PeerId{number}, peer, error, false);
  }
  look_after_leaving(progressed, now);
  std::erase_if(closing_, [this](const auto& lane) { return is_done(*lane); });
  if (!closing_.empty()) check_by(now + kClosingCheck);
}

// ---- the end

void Asking::close_all() {
  while (!peers_.empty()) disconnect(Fabric::PeerId{peers_.begin()->first});
}

bool Asking::all_closed() {
  std::erase_if(closing_, [this](const auto& lane) { return is_done(*lane); });
  return peers_.empty() && leaving_.empty() && closing_.empty();
}

void Asking::worker_is_gone() {
  for (Posted& posted : pool_) {
    if (std::find(free_.begin(), free_.end(), &posted) != free_.end()) continue;
    outcomes_.push_back({.operation = posted.operation,
                         .kind = Outcome::Kind::kAgain,
                         .detail = "its card was closed"});
    free_.push_back(&posted);
  }
  closing_.clear();
}

}  // namespace pegaflow::ucx
