#include "server/peer_link.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <capnp/message.h>
#include <capnp/rpc-twoparty.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/units.h"
#include "capnp/codec.h"
#include "server/job_waits.h"
#include "server/peer_socket.h"
#include "server/rpc_error.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"peers"};

/// The largest answer, a lease, has some 800 KiB; a broken peer is not to make us read more.
constexpr std::uint64_t kTraversalLimitWords = 1 << 20;

/// What a peer that does not read may let pile up here.
constexpr std::size_t kMaxQueued = std::size_t{4} << 20;

/// Leases that ended here while the link was greeted anew; others run out at the owner.
constexpr std::size_t kMostUnreleased = 1024;

/// The longest that a change of epochs here, which no reset sent there, waits to be told.
constexpr std::chrono::milliseconds kWatchPatience{1000};

kj::Duration to_kj(Duration time) { return time.count() * kj::NANOSECONDS; }

void prepare(kj::AsyncIoStream& stream) {
  prepare_peer_socket([&stream](int level, int option, int value) {
    stream.setsockopt(level, option, &value, sizeof value);
  });
}

::capnp::Data::Reader data_of(const Bytes32& bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

}  // namespace

std::string_view to_string(PeerLink::State state) noexcept {
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

/// The parts of one connection; destroyed from the last to the first.
struct PeerLink::Connection final : private kj::TaskSet::ErrorHandler {
  explicit Connection(kj::Own<kj::AsyncIoStream> connected)
      : stream(kj::mv(connected)),
        network(*stream, capnp::rpc::twoparty::Side::CLIENT, reader_options()),
        rpc(capnp::makeRpcClient(network)),
        dropped(kj::newPromiseAndFulfiller<void>()),
        over(network.onDisconnect().exclusiveJoin(kj::mv(dropped.promise)).fork()),
        calls(*this) {}

  static capnp::ReaderOptions reader_options() {
    capnp::ReaderOptions options;
    options.traversalLimitInWords = kTraversalLimitWords;
    return options;
  }

  wire::PeerGate::Client gate() {
    capnp::MallocMessageBuilder message;
    auto server = message.initRoot<capnp::rpc::twoparty::VatId>();
    server.setSide(capnp::rpc::twoparty::Side::SERVER);
    return rpc.bootstrap(server).castAs<wire::PeerGate>();
  }

  void taskFailed(kj::Exception&& exception) override {
    // Calls bring their own failures to whoever asked.
    PEGA_ASSERT(false, "a call to a peer failed: {}", error_from(exception).detail);
  }

  kj::Own<kj::AsyncIoStream> stream;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc;
  std::optional<wire::Peer::Client> peer;
  kj::PromiseFulfillerPair<void> dropped;
  std::string why_dropped;
  bool keeps_ways = false;  ///< The peer may live: what it lent is still read.
  kj::ForkedPromise<void> over;
  std::vector<FabricDescriptor> described;  ///< The peer's lanes.
  std::vector<Way> ways;                    ///< That the fabrics know of.
  std::size_t best_lane = 0;                ///< Of those that both have.
  std::optional<Way> last_resort;           ///< What needs no trial.
  std::uint64_t features = 0;               ///< Of the peer.
  std::uint64_t told = 0;                   ///< Changes of our epochs that it knows.
  std::uint64_t seen = 0;                   ///< Changes of its epochs that we know.
  std::size_t waits = 0;                    ///< Of `calls`: for jobs.
  std::set<std::uint64_t> releasing;        ///< Leases whose release is not answered.
  OpenQuestions open;
  bool is_watched = false;  ///< A task waits for the end of a silence.
  kj::TaskSet calls;        ///< Under way, also those that nobody waits for any more.
};

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
  return attempt().then([this](Result<void>&& outcome) { return finish(outcome); }).then([this]() {
    return run();
  });
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
        return find_way();
      })
      .then([this](Result<void>&& outcome) -> kj::Promise<Result<void>> {
        if (!outcome) return kj::mv(outcome);
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
      return Result<void>(fail(Errc::kRefused, "it chose version {} of {} to {}",
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
    // Before this side proves anything to one that does not know the secret. With two secrets
    // the answer takes the one that the answerer has proved to know.
    const PeerSecret* const shared =
        own_.secrets.find(PeerSecret::Side::kAnswerer, greeting,
                          std::as_bytes(std::span<const kj::byte>(proof.begin(), proof.size())));
    if (shared == nullptr) {
      return Result<void>(fail(Errc::kRefused, "it has another --peer-secret-file"));
    }
    if (greeting.answerer == own_.node) {
      found_self_ = true;
      return Result<void>(fail(Errc::kCancelled, "it is this node"));
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

/// Before the link is ready: a node that has forgotten epochs learns them before it reads, and one
/// that missed a reset learns of it before it is read from.
kj::Promise<Result<void>> PeerLink::exchange_epochs() {
  auto request = connection_->peer->exchangeRequest();
  write_epochs(epochs_.known(), request);
  connection_->told = epochs_.changes();
  return request.send().then([this](capnp::Response<wire::Epochs>&& answer) -> Result<void> {
    PEGA_TRY_LET(const Epochs::Known known, read_epochs(answer));
    learn(known);
    if ((connection_->features & kPeerWatches) != 0) connection_->calls.add(watch_epochs());
    return {};
  });
}

/// A reset that was made while the link was greeted was sent to nobody here.
void PeerLink::tell_epochs() {
  if (!knows_epochs() || connection_->told == epochs_.changes()) return;
  auto request = connection_->peer->exchangeRequest();
  write_epochs(epochs_.known(), request);
  connection_->told = epochs_.changes();
  connection_->calls.add(kj::Promise<capnp::Response<wire::Epochs>>(request.send())
                             .then(
                                 [this](capnp::Response<wire::Epochs>&& answer) {
                                   if (const auto known = read_epochs(answer)) learn(*known);
                                 },
                                 [this](kj::Exception&& exception) { failed(exception); }));
}

/// What a peer said need not be told to it.
void PeerLink::learn(const Epochs::Known& known) {
  const bool has_told_all = connection_->told == epochs_.changes();
  epochs_.learn(known);
  if (has_told_all) connection_->told = epochs_.changes();
}

/// For as long as the connection lives: a reset at the peer is heard of at once, one that this node
/// heard of elsewhere is told soon. A peer that does not answer is found out by other questions.
kj::Promise<void> PeerLink::watch_epochs() {
  auto request = connection_->peer->watchRequest();
  request.setSeen(connection_->seen);
  request.setMilliseconds(static_cast<std::uint32_t>(kWatchPatience.count()));
  if (const std::uint64_t changes = epochs_.changes(); connection_->told != changes) {
    connection_->told = changes;
    write_epochs(epochs_.known(), request.initEpochs());
  }
  const TimePoint asked = clock_.now();
  return request.send()
      .then([this, asked](capnp::Response<wire::Peer::WatchResults>&& answer) -> Result<Duration> {
        if (answer.hasEpochs()) {
          PEGA_TRY_LET(const Epochs::Known known, read_epochs(answer.getEpochs()));
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
          kLog.debug("no news of epochs from a peer peer={} error=\"{}\"", options_.address,
                     to_string(pause.error()));
          return kj::READY_NOW;
        }
        if (*pause == Duration::zero()) return watch_epochs();
        return io_.provider->getTimer().afterDelay(to_kj(*pause)).then([this]() {
          return watch_epochs();
        });
      });
}

// ---- how the bytes come

kj::Promise<Result<void>> PeerLink::find_way() {
  std::vector<std::size_t> common;
  for (std::size_t lane = 0; lane < lanes_.count(); ++lane) {
    if (lanes_.description_for(lane, connection_->described) != nullptr) common.push_back(lane);
  }
  stats_.lane_why.clear();
  trial_pause_ = options_.first_trial_pause;
  if (common.empty()) {
    std::string theirs;
    for (const FabricDescriptor& one : connection_->described) theirs += " " + one.backend;
    return Result<void>(fail(Errc::kRefused, "no lane in common: this node has {} alone, it has{}",
                             lanes_.name(0), theirs));
  }
  connection_->best_lane = common.front();
  if (kept_ && kept_->node == stats_.node) {
    // The same process, that this side took for lost: batches may still read by these ways.
    const Kept kept = *std::exchange(kept_, std::nullopt);
    connection_->ways = {kept.way};
    if (kept.last_resort && *kept.last_resort != kept.way) {
      connection_->ways.push_back(*kept.last_resort);
    }
    connection_->last_resort = kept.last_resort;
    use(kept.way);
    return Result<void>();
  }
  forget_kept();
  if (lanes_.needs_trial(common.back())) return try_lane(common.back());
  auto way = connect(common.back());
  if (!way) return Result<void>(tl::unexpected<Error>(std::move(way.error())));
  connection_->last_resort = *way;
  use(*way);
  return Result<void>();
}

Result<PeerLink::Way> PeerLink::connect(std::size_t lane) {
  const FabricDescriptor& theirs = *lanes_.description_for(lane, connection_->described);
  PEGA_TRY_LET(const Fabric::PeerId peer, lanes_.fabric(lane).connect(theirs));
  const Way way{.lane = lane, .peer = peer, .pool = theirs.regions.front().region};
  connection_->ways.push_back(way);
  return way;
}

void PeerLink::forget_kept() {
  if (!kept_) return;
  const Kept kept = *std::exchange(kept_, std::nullopt);
  disconnect(kept.way);
  if (kept.last_resort && *kept.last_resort != kept.way) disconnect(*kept.last_resort);
}

void PeerLink::disconnect(const Way& way) {
  if (connection_ != nullptr) std::erase(connection_->ways, way);
  // A full queue of the fabric ends with the fabric's next turn.
  if (const auto done = lanes_.fabric(way.lane).disconnect(way.peer); !done) {
    kLog.warn("a lost peer still counts on the lane peer={} error=\"{}\"", options_.address,
              to_string(done.error()));
  }
}

void PeerLink::use(const Way& way) {
  way_ = way;
  stats_.lane = lanes_.name(way.lane);
}

kj::Promise<Result<void>> PeerLink::try_lane(std::size_t lane) {
  if (!lanes_.is_link_up(lane)) {
    return Result<void>(fail(Errc::kBusy, "the link of our card is down"));
  }
  auto way = connect(lane);
  if (!way) return Result<void>(tl::unexpected<Error>(std::move(way.error())));
  return lanes_
      .try_way(lane, way->peer, *lanes_.description_for(lane, connection_->described),
               options_.trial_deadline)
      .then([this, way = *way](Result<void>&& tried) {
        if (tried) {
          stats_.lane_why.clear();
          use(way);
        } else {
          ++stats_.lane_failures;
          disconnect(way);
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
        // Other versions of the library: that does not change in this life of the peer.
        if (why.code == Errc::kRefused) return kj::READY_NOW;
        // Looked at often: it costs next to nothing, unlike a trial.
        return improve(why.code == Errc::kBusy ? options_.first_trial_pause : next_trial_pause());
      });
}

void PeerLink::way_lost(std::uint64_t life, const Way& way, const std::string& why) {
  if (!can_release(life)) return;
  if (!is_ready()) {
    if (kept_ && (kept_->way == way || kept_->last_resort == way)) forget_kept();
    return;
  }
  // Batches of one that is broken fail one after the other.
  if (way != way_) return;
  if (!connection_->last_resort || *connection_->last_resort == way) return lost(life, why);
  disconnect(way);
  use(*connection_->last_resort);
  ++stats_.lane_falls;
  stats_.lane_why = why;
  kLog.warn("a lane to a peer broke, another goes on peer={} broken={} lane={} reason=\"{}\"",
            options_.address, lanes_.name(way.lane), stats_.lane, why);
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
  tell_epochs();
  if (way_.lane != connection_->best_lane) connection_->calls.add(improve(Duration::zero()));
  return connection_->over.addBranch().then([this]() -> Result<void> {
    ++stats_.losses;
    if (!connection_->why_dropped.empty()) {
      return fail(Errc::kPeerLost, "{}", connection_->why_dropped);
    }
    return fail(Errc::kPeerLost, "it closed the connection");
  });
}

kj::Promise<void> PeerLink::finish(const Result<void>& outcome) {
  const bool was_ready = is_ready();
  if (connection_ != nullptr) {
    const bool keeps = was_ready && connection_->keeps_ways;
    if (keeps) kept_ = {ready_node_, way_, connection_->last_resort};
    // A connection that breaks may take with it what it had delivered.
    for (const std::uint64_t lease : connection_->releasing) {
      if (unreleased_.size() < kMostUnreleased) unreleased_.push_back(lease);
    }
    for (const Way& way : std::vector<Way>(connection_->ways)) {
      if (!keeps || (way != kept_->way && kept_->last_resort != way)) disconnect(way);
    }
  }
  connection_ = nullptr;
  stats_.lane.clear();
  const Error& why = outcome.error();
  if (std::exchange(found_self_, false)) {
    say(State::kSelf, "");
    pause_ = options_.first_pause;
    return io_.provider->getTimer().afterDelay(to_kj(options_.longest_pause));
  }
  const bool is_refused = why.code == Errc::kRefused;
  if (!was_ready) ++stats_.failures;
  if (is_refused) ++stats_.refusals;
  say(is_refused ? State::kRefused : State::kConnecting, why.detail);
  const Duration pause = is_refused ? options_.longest_pause : pause_;
  pause_ = std::min(2 * pause_, options_.longest_pause);
  return io_.provider->getTimer().afterDelay(to_kj(pause));
}

void PeerLink::say(State state, std::string why) {
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
      kLog.error(
          "peer refused, a person has to change something peer={} build=\"{}\" reason=\"{}\"",
          options_.address, stats_.build, stats_.why);
      break;
    case State::kSelf:
      kLog.info("this node is in its own list of peers peer={}", options_.address);
      break;
    case State::kConnecting:
      kLog.warn("{}, dialed again peer={} reason=\"{}\"",
                was_ready ? "peer lost" : "peer not there", options_.address, stats_.why);
      break;
  }
  changed_();
}

Error PeerLink::failed(const kj::Exception& exception) {
  Error error = error_from(exception);
  // Whatever it did to our call, it is the peer's doing and ends this life of it.
  error.code = Errc::kPeerLost;
  return error;
}

// ---- questions

/// Errors: kPeerLost when the link is not ready; kBusy while the peer is silent.
Result<void> PeerLink::check_askable() {
  if (!is_ready()) return fail(Errc::kPeerLost, "the peer is not ready");
  if (!connection_->open.is_silent()) return {};
  ++stats_.withheld;
  return fail(Errc::kBusy, "the peer owes answers");
}

void PeerLink::missed(OpenQuestions::Number question) {
  ++stats_.late;
  if (!connection_->open.missed(question) || connection_->is_watched) return;
  connection_->is_watched = true;
  connection_->calls.add(watch_silence());
}

/// Ends when the peer has answered something, or is lost.
kj::Promise<void> PeerLink::watch_silence() {
  const Duration patience = std::max(3 * options_.call_deadline, options_.least_silence);
  kj::Timer& timer = io_.provider->getTimer();
  const auto since = connection_->open.silent_since();
  if (!since) {
    connection_->is_watched = false;
    return kj::READY_NOW;
  }
  const Duration left = *since + patience - clock_.now();
  if (left > Duration::zero()) {
    return timer.afterDelay(to_kj(left)).then([this]() { return watch_silence(); });
  }
  // It may be this process that stood still, with the answer in its socket: that is read first.
  return timer.afterDelay(to_kj(options_.call_deadline)).then([this, since, patience]() {
    if (connection_->open.silent_since() == since) {
      drop(fmt::format("no answer for {}", format_duration(patience)));
      return kj::Promise<void>(kj::READY_NOW);
    }
    return watch_silence();
  });
}

/// The peer does not answer, and may live. Its lanes see for themselves.
void PeerLink::drop(const std::string& why) {
  if (connection_->why_dropped.empty()) {
    connection_->why_dropped = why;
    connection_->keeps_ways = true;
  }
  connection_->dropped.fulfiller->fulfill();
}

void PeerLink::lost(std::uint64_t life, const std::string& why) {
  if (!can_release(life)) return;
  if (!is_ready()) return forget_kept();
  connection_->keeps_ways = false;
  if (connection_->why_dropped.empty()) connection_->why_dropped = why;
  connection_->dropped.fulfiller->fulfill();
}

/// Waits for an answer, for which the peer may work for `work`, until the deadline behind that.
/// `decode` gets the answer also when it comes later; what it then returns is discarded.
template <typename T, typename Answer, typename Decode>
kj::Promise<Result<T>> PeerLink::answered(kj::Promise<Answer>&& answer, Duration work,
                                          Decode decode) {
  auto pair = kj::newPromiseAndFulfiller<Result<T>>();
  // Shared by both ends of the call, of which one runs.
  auto fulfiller =
      std::make_shared<kj::Own<kj::PromiseFulfiller<Result<T>>>>(kj::mv(pair.fulfiller));
  const std::uint64_t asked_in = life();
  const OpenQuestions::Number question = connection_->open.ask(clock_.now() + work);
  connection_->calls.add(answer
                             .then([this, question, fulfiller, decode](Answer&& response) mutable {
                               connection_->open.answered(question, clock_.now());
                               Result<T> value = decode(response, (*fulfiller)->isWaiting());
                               return value;
                             })
                             .catch_([this, question](kj::Exception&& exception) {
                               connection_->open.ended(question);
                               return Result<T>(tl::unexpected<Error>(failed(exception)));
                             })
                             .then([this, fulfiller, asked_in](Result<T>&& value) {
                               if (!value && value.error().code == Errc::kInternal) {
                                 lost(asked_in, value.error().detail);
                               }
                               (*fulfiller)->fulfill(kj::mv(value));
                             }));
  const Duration deadline = work + options_.call_deadline;
  return pair.promise
      .catch_([](kj::Exception&&) {
        // The connection went, with all that was asked on it.
        return Result<T>(fail(Errc::kPeerLost, "the peer went away"));
      })
      .exclusiveJoin(io_.provider->getTimer().afterDelay(to_kj(deadline)).then([=, this]() {
        if (is_ready() && life() == asked_in) missed(question);
        return Result<T>(fail(Errc::kTimeout, "no answer within {}", format_duration(deadline)));
      }));
}

kj::Promise<Result<std::size_t>> PeerLink::locate(const Bytes32& space,
                                                  std::span<const BlockKey> keys) {
  using Answer = capnp::Response<wire::Peer::LocateResults>;
  if (auto may = check_askable(); !may) {
    return Result<std::size_t>(tl::unexpected<Error>(std::move(may.error())));
  }
  if (connection_->network.getCurrentQueueSize() > kMaxQueued) {
    lost(life(), "it does not read what it is sent");
    return Result<std::size_t>(fail(Errc::kPeerLost, "the peer does not read"));
  }
  const Epoch epoch = epochs_.of(space);
  // An older node may have missed any reset.
  if (!knows_epochs() && !epoch.is_zero()) return Result<std::size_t>(std::size_t{0});
  auto request = connection_->peer->locateRequest(
      capnp::MessageSize{keys_words(keys.size(), BlockKey::kMaxBytes) + 16, 0});
  request.setSpace(data_of(space));
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  write_epoch(epoch, request.initEpoch());
  return answered<std::size_t>(
      kj::Promise<Answer>(request.send()), Duration::zero(),
      [this, space, epoch, asked = keys.size()](Answer& answer, bool) -> Result<std::size_t> {
        if (answer.getSealed() > asked) {
          return fail(Errc::kInternal, "it has {} of {} blocks", answer.getSealed(), asked);
        }
        PEGA_TRY_LET(const bool is_same, is_of_epoch(space, epoch, answer.getEpoch()));
        return is_same ? answer.getSealed() : 0;
      });
}

kj::Promise<Result<LeaseGrant>> PeerLink::lease(const Bytes32& space,
                                                std::span<const BlockKey> keys, std::size_t shards,
                                                std::chrono::milliseconds time) {
  using Answer = capnp::Response<wire::Peer::LeaseResults>;
  if (auto may = check_askable(); !may) {
    return Result<LeaseGrant>(tl::unexpected<Error>(std::move(may.error())));
  }
  const Epoch epoch = epochs_.of(space);
  if (!knows_epochs() && !epoch.is_zero()) return Result<LeaseGrant>(LeaseGrant{});
  auto request = connection_->peer->leaseRequest(
      capnp::MessageSize{keys_words(keys.size(), BlockKey::kMaxBytes) + 16, 0});
  request.setSpace(data_of(space));
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  request.setMilliseconds(static_cast<std::uint32_t>(time.count()));
  write_epoch(epoch, request.initEpoch());
  return answered<LeaseGrant>(kj::Promise<Answer>(request.send()), Duration::zero(),
                              [this, space, epoch, shards, asked = keys.size()](
                                  Answer& answer, bool in_time) -> Result<LeaseGrant> {
                                PEGA_TRY_LET(LeaseGrant grant, read_grant(answer, asked, shards));
                                PEGA_TRY_LET(const bool is_same,
                                             is_of_epoch(space, epoch, answer.getEpoch()));
                                if (grant.lease != 0 && (!in_time || !is_same)) {
                                  release(grant.lease);
                                  return LeaseGrant{};
                                }
                                return grant;
                              });
}

/// Whether an answer is of the epoch that was asked for, and is still ours.
Result<bool> PeerLink::is_of_epoch(const Bytes32& space, const Epoch& asked,
                                   wire::Epoch::Reader answer) {
  if (!knows_epochs()) return epochs_.of(space).is_zero();
  const auto theirs = read_epoch(answer);
  if (!theirs) return fail(Errc::kInternal, "{}", theirs.error().detail);
  epochs_.learn(space, *theirs);
  return *theirs == asked && epochs_.of(space) == asked;
}

kj::Promise<Result<bool>> PeerLink::confirm(std::uint64_t lease, Duration patience) {
  using Answer = capnp::Response<wire::Peer::ConfirmResults>;
  if (!is_ready()) return Result<bool>(fail(Errc::kPeerLost, "the peer is not ready"));
  if (!knows_epochs()) return Result<bool>(true);
  auto request = connection_->peer->confirmRequest();
  request.setLease(lease);
  return answered<bool>(kj::Promise<Answer>(request.send()), work_of(patience),
                        [](Answer& answer, bool) -> Result<bool> { return answer.getHeld(); });
}

kj::Promise<Result<Epoch>> PeerLink::reset(const Bytes32& space, const Epoch& epoch,
                                           Duration patience) {
  using Answer = capnp::Response<wire::Peer::ResetResults>;
  if (!is_ready()) return Result<Epoch>(fail(Errc::kPeerLost, "the peer is not ready"));
  if (!knows_epochs()) {
    return Result<Epoch>(fail(Errc::kRefused, "peer {} is too old to be reset", address()));
  }
  auto request = connection_->peer->resetRequest();
  request.setSpace(data_of(space));
  write_epoch(epoch, request.initEpoch());
  return answered<Epoch>(kj::Promise<Answer>(request.send()), work_of(patience),
                         [](Answer& answer, bool) -> Result<Epoch> {
                           auto theirs = read_epoch(answer.getEpoch());
                           if (!theirs) theirs.error().code = Errc::kInternal;
                           return theirs;
                         });
}

kj::Promise<Result<void>> PeerLink::await_job(const JobId& job, Duration patience) {
  using Answer = capnp::Response<wire::Done>;
  if (auto may = check_askable(); !may) return kj::mv(may);
  if (stats_.version < kPeerWireAwaitsJobs) {
    return Result<void>(fail(Errc::kRefused, "peer {} is too old to wait for jobs", address()));
  }
  if (connection_->waits >= kMaxWaits) {
    return Result<void>(fail(Errc::kBusy, "{} wait for jobs of {} already", kMaxWaits, address()));
  }
  patience = std::clamp(patience, Duration::zero(), Duration(JobWaits::kLongest));
  const Duration asked = std::max<Duration>(patience - options_.call_deadline, patience * 3 / 4);
  auto request = connection_->peer->awaitJobRequest();
  write_job(job, request.initJob());
  request.setMilliseconds(static_cast<std::uint32_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(asked).count()));
  ++connection_->waits;
  // Given up or not, it is one of the peer's until that has answered.
  auto sent = kj::Promise<Answer>(request.send()).attach(kj::defer([&waits = connection_->waits]() {
    --waits;
  }));
  return answered<void>(kj::mv(sent), asked,
                        [](Answer& answer, bool) { return read_done(answer); });
}

void PeerLink::release(std::uint64_t lease) {
  if (!is_ready()) {
    if (unreleased_.size() < kMostUnreleased) unreleased_.push_back(lease);
    return;
  }
  auto request = connection_->peer->releaseRequest();
  request.setLease(lease);
  connection_->releasing.insert(lease);
  connection_->calls.add(
      kj::Promise<capnp::Response<wire::Done>>(request.send())
          .then(
              [this, lease](capnp::Response<wire::Done>&&) { connection_->releasing.erase(lease); },
              [this](kj::Exception&& exception) { failed(exception); }));
}

}  // namespace pegaflow
