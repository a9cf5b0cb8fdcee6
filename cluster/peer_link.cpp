#include "cluster/peer_link.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/units.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/kj_time.h"
#include "capnp/wire/rpc_error.h"
#include "cluster/peer_link_impl.h"
#include "cluster/peer_socket.h"

namespace pegaflow::cluster {
namespace {

constexpr Log kLog{"peers"};

/// The longest time until a change of epochs that no reset has sent to the peer is sent to it.
constexpr std::chrono::milliseconds kWatchPatience{1000};

void prepare(kj::AsyncIoStream& stream) {
  prepare_peer_socket([&stream](int level, int option, int value) {
    stream.setsockopt(level, option, &value, sizeof value);
  });
}

}  // namespace

std::string_view to_string(PeerState state) noexcept {
  switch (state) {
    case PeerLink::State::kConnecting:
      return "connecting";
    case PeerLink::State::kReady:
      return "ready";
    case PeerLink::State::kRefused:
      return "refused";
    case PeerLink::State::kSelf:
      return "self";
  }
  return "connecting";
}

PeerLink::PeerLink(kj::AsyncIoContext& io, const OwnNode& own, Epochs& epochs, Options options,
                   Lanes& lanes, std::function<void()> changed)
    : io_(io),
      own_(own),
      epochs_(epochs),
      options_(std::move(options)),
      lanes_(lanes),
      changed_(std::move(changed)),
      pause_(options_.first_pause) {}

PeerLink::~PeerLink() noexcept(false) = default;

kj::Promise<void> PeerLink::run() {
  if (options_.is_parked) {
    return pause(Duration::zero()).then([this]() { return run(); });
  }
  return attempt().then([this](Result<void>&& outcome) { return finish(outcome); }).then([this]() {
    return run();
  });
}

/// Waits for `time`, and while the link is parked for dial(), which ends the wait in any case.
kj::Promise<void> PeerLink::pause(Duration time) {
  auto pair = kj::newPromiseAndFulfiller<void>();
  wake_ = kj::mv(pair.fulfiller);
  is_pausing_ = true;
  auto woken = options_.is_parked
                   ? kj::mv(pair.promise)
                   : pair.promise.exclusiveJoin(io_.provider->getTimer().afterDelay(to_kj(time)));
  return woken.then([this]() {
    is_pausing_ = false;
    wake_ = nullptr;
  });
}

void PeerLink::dial(std::string address) {
  PEGA_ASSERT(is_resting(), "{} is not resting", options_.address);
  options_.address = std::move(address);
  options_.is_parked = false;
  pause_ = options_.first_pause;
  stats_.state = State::kConnecting;
  stats_.why.clear();
  KJ_IF_MAYBE (wake, wake_) {
    (*wake)->fulfill();
  }
}

void PeerLink::park() {
  if (std::exchange(options_.is_parked, true)) return;
  if (connection_ != nullptr) {
    connection_->why_dropped = "not used";
    connection_->rpc.drop();
  }
  KJ_IF_MAYBE (wake, wake_) {
    (*wake)->fulfill();
  }
}

kj::Promise<Result<void>> PeerLink::attempt() {
  kj::Timer& timer = io_.provider->getTimer();
  kj::Promise<Result<void>> greeted =
      io_.provider->getNetwork()
          .parseAddress(options_.address.c_str())
          .then([](kj::Own<kj::NetworkAddress>&& address) {
            auto connecting = address->connect();
            return connecting.attach(kj::mv(address));
          })
          .then([this](kj::Own<kj::AsyncIoStream>&& stream) {
            prepare(*stream);
            connection_ = std::make_unique<Connection>(kj::mv(stream));
            return greet();
          })
          .catch_([this](kj::Exception&& exception) {
            return Result<void>(tl::unexpected<Error>(failed(exception)));
          });
  return greeted
      .exclusiveJoin(timer.afterDelay(to_kj(options_.greet_deadline)).then([this]() {
        return Result<void>(fail(Errc::kTimeout, "no greeting within {}",
                                 format_duration(options_.greet_deadline)));
      }))
      .then([this](Result<void>&& outcome) -> kj::Promise<Result<void>> {
        if (!outcome) return kj::mv(outcome);
        return find_route();
      })
      .then([this](Result<void>&& outcome) -> kj::Promise<Result<void>> {
        if (!outcome) return kj::mv(outcome);
        // It was parked while it connected.
        if (options_.is_parked) return Result<void>(fail(Errc::kPeerLost, "not used"));
        return serve();
      });
}

kj::Promise<Result<void>> PeerLink::greet() {
  auto request = connection_->gate().greetRequest();
  request.setMinimum(kPeerWireMinimum);
  request.setMaximum(options_.maximum_version);
  request.setFeatures(kPeerFeatures);
  write_id(own_.node, request.initNode());
  request.setBuild(own_.build.c_str());
  const Bytes32 challenge = random_bytes32();
  request.setChallenge(data_of(challenge));
  request.setListen(own_.listen.c_str());
  request.setDialed(options_.address.c_str());
  return request.send().then([this,
                              challenge](capnp::Response<wire::PeerGate::GreetResults>&& answer)
                                 -> kj::Promise<Result<void>> {
    const auto build = answer.getBuild();
    stats_.build.assign(build.begin(), std::min<std::size_t>(build.size(), 256));
    if (answer.getVersion() == 0) {
      Error why = read_error(answer.getRefused());
      if (answer.getMaximum() < kPeerWireMinimum || answer.getMinimum() > kPeerWireMaximum) {
        why.code = Errc::kRefused;
      }
      return Result<void>(tl::unexpected<Error>(std::move(why)));
    }
    if (answer.getVersion() < kPeerWireMinimum || answer.getVersion() > options_.maximum_version) {
      return Result<void>(fail(Errc::kRefused, "the peer chose version {} of {} to {}",
                               answer.getVersion(), kPeerWireMinimum, options_.maximum_version));
    }
    PeerSecret::Greeting greeting{
        .dialer = own_.node, .answerer = read_id(answer.getNode()), .dialer_challenge = challenge};
    auto theirs = read_bytes32(answer.getChallenge());
    if (!theirs) return Result<void>(tl::unexpected<Error>(std::move(theirs.error())));
    greeting.answerer_challenge = *theirs;
    stats_.version = answer.getVersion();
    connection_->features = answer.getFeatures();
    const auto proof = answer.getProof();
    // Before this side proves anything to a node that does not know the secret. With two secrets
    // the response uses the one that the answerer has proved to know.
    const PeerSecret* const shared =
        own_.secrets.find(PeerSecret::Side::kAnswerer, greeting,
                          std::as_bytes(std::span<const kj::byte>(proof.begin(), proof.size())));
    if (shared == nullptr) {
      return Result<void>(fail(Errc::kRefused, "the peer has another --peer-secret-file"));
    }
    if (greeting.answerer == own_.node) {
      found_self_ = true;
      return Result<void>(fail(Errc::kCancelled, "the address leads to this node"));
    }
    stats_.node = greeting.answerer;
    return enter(greeting, *shared);
  });
}

kj::Promise<Result<void>> PeerLink::enter(const PeerSecret::Greeting& greeting,
                                          const PeerSecret& secret) {
  auto request = connection_->gate().enterRequest();
  const Bytes32 proof = secret.prove(PeerSecret::Side::kDialer, greeting);
  request.setProof(data_of(proof));
  return request.send().then(
      [this](capnp::Response<wire::PeerGate::EnterResults>&& answer) -> kj::Promise<Result<void>> {
        if (!answer.hasPeer()) {
          return Result<void>(tl::unexpected<Error>(read_error(answer.getRefused())));
        }
        auto described = read_fabrics(answer);
        if (!described) return Result<void>(tl::unexpected<Error>(std::move(described.error())));
        connection_->described = std::move(*described);
        connection_->peer = answer.getPeer();
        if (!knows_epochs()) return Result<void>();
        return exchange_epochs();
      });
}

/// Before the link is ready: a node that has lost its epochs receives them before it reads, and a
/// node that missed a reset receives it before others read from it.
kj::Promise<Result<void>> PeerLink::exchange_epochs() {
  auto request = connection_->peer->exchangeRequest();
  write_epochs(epochs_.known(), request);
  connection_->sent = epochs_.changes();
  return request.send().then([this](capnp::Response<wire::Epochs>&& answer) -> Result<void> {
    PEGA_TRY_LET(const KnownEpochs known, read_epochs(answer));
    learn(known);
    if ((connection_->features & kPeerWatches) != 0) connection_->calls.add(watch_epochs());
    return {};
  });
}

/// Sends the changes that were made during the greeting, when a reset could not be sent by this
/// link.
void PeerLink::send_epochs() {
  if (!knows_epochs() || connection_->sent == epochs_.changes()) return;
  auto request = connection_->peer->exchangeRequest();
  write_epochs(epochs_.known(), request);
  connection_->sent = epochs_.changes();
  connection_->calls.add(kj::Promise<capnp::Response<wire::Epochs>>(request.send())
                             .then(
                                 [this](capnp::Response<wire::Epochs>&& answer) {
                                   if (const auto known = read_epochs(answer)) learn(*known);
                                 },
                                 [this](kj::Exception&& exception) { failed(exception); }));
}

/// Epochs that the peer has sent are not sent back to it.
void PeerLink::learn(const KnownEpochs& known) {
  const bool has_sent_all = connection_->sent == epochs_.changes();
  epochs_.learn(known);
  if (has_sent_all) connection_->sent = epochs_.changes();
}

/// Runs while the connection is open: receives a reset at the peer at once, and sends a reset that
/// this node received elsewhere within kWatchPatience. Other requests detect a peer that does not
/// answer.
kj::Promise<void> PeerLink::watch_epochs() {
  auto request = connection_->peer->watchRequest();
  request.setSeen(connection_->seen);
  request.setMilliseconds(static_cast<std::uint32_t>(kWatchPatience.count()));
  if (const std::uint64_t changes = epochs_.changes(); connection_->sent != changes) {
    connection_->sent = changes;
    write_epochs(epochs_.known(), request.initEpochs());
  }
  const TimePoint asked = clock_.now();
  return request.send()
      .then([this, asked](capnp::Response<wire::Peer::WatchResults>&& answer) -> Result<Duration> {
        if (answer.hasEpochs()) {
          PEGA_TRY_LET(const KnownEpochs known, read_epochs(answer.getEpochs()));
          learn(known);
        }
        const std::uint64_t before = std::exchange(connection_->seen, answer.getChanges());
        const bool is_news = before != connection_->seen;
        const bool waited = clock_.now() - asked >= kWatchPatience / 2;
        return is_news || waited ? Duration::zero() : Duration(kWatchPatience);
      })
      .catch_([this](kj::Exception&& exception) {
        return Result<Duration>(tl::unexpected<Error>(failed(exception)));
      })
      .then([this](Result<Duration>&& pause) -> kj::Promise<void> {
        if (!pause) {
          kLog.debug("watch of epochs ended peer={} error=\"{}\"", options_.address,
                     to_string(pause.error()));
          return kj::READY_NOW;
        }
        if (*pause == Duration::zero()) return watch_epochs();
        return io_.provider->getTimer().afterDelay(to_kj(*pause)).then([this]() {
          return watch_epochs();
        });
      });
}

// ---- lanes and routes

kj::Promise<Result<void>> PeerLink::find_route() {
  std::vector<std::size_t> common;
  for (std::size_t lane = 0; lane < lanes_.count(); ++lane) {
    if (lanes_.description_for(lane, connection_->described) != nullptr) common.push_back(lane);
  }
  stats_.lane_why.clear();
  trial_pause_ = options_.first_trial_pause;
  if (common.empty()) {
    std::string theirs;
    for (const FabricDescriptor& one : connection_->described) theirs += " " + one.backend;
    return Result<void>(fail(Errc::kRefused,
                             "no lane in common: this node has only {}, the peer has{}",
                             lanes_.name(0), theirs));
  }
  connection_->best_lane = common.front();
  if (kept_ && kept_->node == stats_.node) {
    // The same process, which this side had lost: batches in flight may use these routes.
    const Kept kept = *std::exchange(kept_, std::nullopt);
    connection_->routes = {kept.route};
    if (kept.last_resort && *kept.last_resort != kept.route) {
      connection_->routes.push_back(*kept.last_resort);
    }
    connection_->last_resort = kept.last_resort;
    use(kept.route);
    return Result<void>();
  }
  forget_kept();
  if (lanes_.needs_trial(common.back())) return try_lane(common.back());
  auto route = connect(common.back());
  if (!route) return Result<void>(tl::unexpected<Error>(std::move(route.error())));
  connection_->last_resort = *route;
  use(*route);
  return Result<void>();
}

Result<PeerLink::Route> PeerLink::connect(std::size_t lane) {
  const FabricDescriptor& theirs = *lanes_.description_for(lane, connection_->described);
  PEGA_TRY_LET(const Fabric::PeerId peer, lanes_.fabric(lane).connect(theirs));
  const Route route{.lane = lane, .peer = peer, .pool = theirs.regions.front().region};
  connection_->routes.push_back(route);
  return route;
}

const FabricDescriptor* PeerLink::fabric() const {
  if (!is_ready() || connection_ == nullptr) return nullptr;
  return lanes_.description_for(route_.lane, connection_->described);
}

void PeerLink::forget_kept() {
  if (!kept_) return;
  const Kept kept = *std::exchange(kept_, std::nullopt);
  disconnect(kept.route);
  if (kept.last_resort && *kept.last_resort != kept.route) disconnect(*kept.last_resort);
}

void PeerLink::disconnect(const Route& route) {
  if (connection_ != nullptr) std::erase(connection_->routes, route);
  // The queue of the fabric is full: it drains in its next iteration.
  if (const auto done = lanes_.fabric(route.lane).disconnect(route.peer); !done) {
    kLog.warn("a lost peer is still connected to the lane peer={} error=\"{}\"", options_.address,
              to_string(done.error()));
  }
}

void PeerLink::use(const Route& route) {
  route_ = route;
  stats_.lane = lanes_.name(route.lane);
}

kj::Promise<Result<void>> PeerLink::try_lane(std::size_t lane) {
  if (!lanes_.is_link_up(lane)) {
    return Result<void>(fail(Errc::kBusy, "the link of this node's card is down"));
  }
  auto route = connect(lane);
  if (!route) return Result<void>(tl::unexpected<Error>(std::move(route.error())));
  return lanes_
      .try_route(lane, route->peer, *lanes_.description_for(lane, connection_->described),
                 options_.trial_deadline)
      .then([this, route = *route](Result<void>&& tried) {
        if (tried) {
          stats_.lane_why.clear();
          use(route);
        } else {
          ++stats_.lane_failures;
          disconnect(route);
        }
        return kj::mv(tried);
      });
}

Duration PeerLink::next_trial_pause() {
  return std::exchange(trial_pause_, std::min(2 * trial_pause_, options_.longest_trial_pause));
}

kj::Promise<void> PeerLink::improve(Duration pause) {
  return io_.provider->getTimer()
      .afterDelay(to_kj(pause))
      .then([this]() { return try_lane(connection_->best_lane); })
      .then([this](Result<void>&& tried) -> kj::Promise<void> {
        if (tried) {
          kLog.info("peer is read over a better lane peer={} lane={}", options_.address,
                    stats_.lane);
          changed_();
          return kj::READY_NOW;
        }
        const Error& why = tried.error();
        if (stats_.lane_why != why.detail) {
          stats_.lane_why = why.detail;
          kLog.warn("peer is read over a lesser lane peer={} lane={} better={} reason=\"{}\"",
                    options_.address, stats_.lane, lanes_.name(connection_->best_lane),
                    to_string(why));
          changed_();
        }
        // Other versions of the library: they do not change in this life of the peer.
        if (why.code == Errc::kRefused) return kj::READY_NOW;
        // A link that is down is checked often: unlike a trial, that is cheap.
        return improve(why.code == Errc::kBusy ? options_.first_trial_pause : next_trial_pause());
      });
}

void PeerLink::route_lost(std::uint64_t life, const Route& route, const std::string& why) {
  if (!can_release(life)) return;
  if (!is_ready()) {
    if (kept_ && (kept_->route == route || kept_->last_resort == route)) forget_kept();
    return;
  }
  // Batches of a broken route fail one after the other.
  if (route != route_) return;
  if (!connection_->last_resort || *connection_->last_resort == route) return lost(life, why);
  disconnect(route);
  use(*connection_->last_resort);
  ++stats_.lane_falls;
  stats_.lane_why = why;
  kLog.warn(
      "a lane to a peer broke, reads continue on another peer={} broken={} lane={} reason=\"{}\"",
      options_.address, lanes_.name(route.lane), stats_.lane, why);
  changed_();
  connection_->calls.add(improve(next_trial_pause()));
}

kj::Promise<Result<void>> PeerLink::serve() {
  ++stats_.greetings;
  pause_ = options_.first_pause;
  if (std::exchange(ready_node_, stats_.node) != stats_.node) {
    node_since_ = stats_.greetings;
    unreleased_.clear();
  }
  say(State::kReady, "");
  for (const std::uint64_t lease : std::exchange(unreleased_, {})) release(lease);
  send_epochs();
  if (route_.lane != connection_->best_lane) connection_->calls.add(improve(Duration::zero()));
  return connection_->rpc.on_over().then([this]() -> Result<void> {
    ++stats_.losses;
    if (!connection_->why_dropped.empty()) {
      return fail(Errc::kPeerLost, "{}", connection_->why_dropped);
    }
    return fail(Errc::kPeerLost, "the peer closed the connection");
  });
}

kj::Promise<void> PeerLink::finish(const Result<void>& outcome) {
  const bool was_ready = is_ready();
  if (connection_ != nullptr) {
    const bool keeps = was_ready && connection_->keeps_routes;
    if (keeps) kept_ = {ready_node_, route_, connection_->last_resort};
    // A connection that breaks may lose releases that were sent.
    for (const std::uint64_t lease : connection_->releasing) {
      release_later(lease);
    }
    for (const Route& route : std::vector<Route>(connection_->routes)) {
      if (!keeps || (route != kept_->route && kept_->last_resort != route)) disconnect(route);
    }
  }
  connection_ = nullptr;
  stats_.lane.clear();
  const Error& why = outcome.error();
  if (std::exchange(found_self_, false)) {
    say(State::kSelf, "");
    pause_ = options_.first_pause;
    return pause(options_.longest_pause);
  }
  const bool is_refused = why.code == Errc::kRefused;
  if (!was_ready) ++stats_.failures;
  if (is_refused) ++stats_.refusals;
  say(is_refused ? State::kRefused : State::kConnecting, why.detail);
  const Duration time = is_refused ? options_.longest_pause : pause_;
  pause_ = std::min(2 * pause_, options_.longest_pause);
  return pause(time);
}

void PeerLink::say(State state, std::string why) {
  // The end of a link that was parked is no event.
  if (options_.is_parked) {
    stats_.state = State::kConnecting;
    stats_.why = std::move(why);
    return changed_();
  }
  const bool is_news = stats_.state != state || stats_.why != why;
  const bool was_ready = stats_.state == State::kReady;
  stats_.state = state;
  stats_.why = std::move(why);
  if (!is_news) return;
  switch (state) {
    case State::kReady:
      kLog.info("peer ready peer={} lane={} build=\"{}\"", options_.address, stats_.lane,
                stats_.build);
      break;
    case State::kRefused:
      kLog.error("peer rejected: fix the configuration peer={} build=\"{}\" reason=\"{}\"",
                 options_.address, stats_.build, stats_.why);
      break;
    case State::kSelf:
      kLog.info("a peer address is this node's own peer={}", options_.address);
      break;
    case State::kConnecting:
      kLog.warn("{}, dialing again peer={} reason=\"{}\"",
                was_ready ? "peer lost" : "peer not connected", options_.address, stats_.why);
      break;
  }
  changed_();
}

Error PeerLink::failed(const kj::Exception& exception) {
  Error error = error_from(exception);
  // Every failure of a call is caused by the peer and ends this life of it.
  error.code = Errc::kPeerLost;
  return error;
}

/// The peer does not answer, but may be alive. Its lanes detect a lost peer by themselves.
void PeerLink::drop(const std::string& why) {
  if (connection_->why_dropped.empty()) {
    connection_->why_dropped = why;
    connection_->keeps_routes = true;
  }
  connection_->rpc.drop();
}

void PeerLink::lost(std::uint64_t life, const std::string& why) {
  if (!can_release(life)) return;
  if (!is_ready()) return forget_kept();
  connection_->keeps_routes = false;
  if (connection_->why_dropped.empty()) connection_->why_dropped = why;
  connection_->rpc.drop();
}

}  // namespace pegaflow::cluster
