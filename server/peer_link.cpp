#include "server/peer_link.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <capnp/message.h>
#include <capnp/rpc-twoparty.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/units.h"
#include "capnp/codec.h"
#include "server/job_waits.h"
#include "server/rpc_error.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"peers"};

/// The largest answer, a lease, has some 800 KiB; a broken peer is not to make us read more.
constexpr std::uint64_t kTraversalLimitWords = 1 << 20;

/// What a peer that does not read may let pile up here.
constexpr std::size_t kMaxQueued = std::size_t{4} << 20;

/// A machine that went away without a word is noticed within about this time, if it is asked.
constexpr int kUserTimeoutMs = 2000;
constexpr int kKeepAliveIdleS = 5;
constexpr int kKeepAliveIntervalS = 1;
constexpr int kKeepAliveProbes = 3;

kj::Duration to_kj(Duration time) { return time.count() * kj::NANOSECONDS; }

void set(kj::AsyncIoStream& stream, int level, int option, int value) {
  stream.setsockopt(level, option, &value, sizeof value);
}

void prepare(kj::AsyncIoStream& stream) {
  set(stream, IPPROTO_TCP, TCP_NODELAY, 1);
  set(stream, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
  set(stream, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(stream, IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveIdleS);
  set(stream, IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveIntervalS);
  set(stream, IPPROTO_TCP, TCP_KEEPCNT, kKeepAliveProbes);
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
  kj::ForkedPromise<void> over;
  std::vector<FabricDescriptor> described;  ///< The peer's lanes.
  std::vector<Way> ways;                    ///< That the fabrics know of.
  std::size_t best_lane = 0;                ///< Of those that both have.
  std::optional<Way> last_resort;           ///< What needs no trial.
  std::size_t waits = 0;                    ///< Of `calls`: for jobs.
  kj::TaskSet calls;  ///< Under way, also those that nobody waits for any more.
};

PeerLink::PeerLink(kj::AsyncIoContext& io, const OwnNode& own, Options options, Lanes& lanes,
                   std::function<void()> changed)
    : io_(io),
      own_(own),
      options_(std::move(options)),
      lanes_(lanes),
      changed_(std::move(changed)),
      pause_(options_.first_pause) {}

PeerLink::~PeerLink() noexcept(false) = default;

kj::Promise<void> PeerLink::run() {
  return attempt()
      .then([this](Result<void>&& outcome) { return finish(outcome); })
      .then([this]() -> kj::Promise<void> {
        if (stats_.state == State::kSelf) return kj::NEVER_DONE;
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
  request.setMaximum(kPeerWireMaximum);
  write_id(own_.node, request.initNode());
  request.setBuild(own_.build.c_str());
  const Bytes32 challenge = random_bytes32();
  request.setChallenge(data_of(challenge));
  return request.send().then(
      [this, challenge](
          capnp::Response<wire::PeerGate::GreetResults>&& answer) -> kj::Promise<Result<void>> {
        const auto build = answer.getBuild();
        stats_.build.assign(build.begin(), std::min<std::size_t>(build.size(), 256));
        if (answer.getVersion() == 0) {
          Error why = read_error(answer.getRefused());
          if (answer.getMaximum() < kPeerWireMinimum || answer.getMinimum() > kPeerWireMaximum) {
            why.code = Errc::kRefused;
          }
          return Result<void>(tl::unexpected<Error>(std::move(why)));
        }
        if (answer.getVersion() < kPeerWireMinimum || answer.getVersion() > kPeerWireMaximum) {
          return Result<void>(fail(Errc::kRefused, "it chose version {} of {} to {}",
                                   answer.getVersion(), kPeerWireMinimum, kPeerWireMaximum));
        }
        PeerSecret::Greeting greeting{.dialer = own_.node,
                                      .answerer = read_id(answer.getNode()),
                                      .dialer_challenge = challenge};
        if (greeting.answerer == own_.node) {
          stats_.state = State::kSelf;
          return Result<void>(fail(Errc::kCancelled, "it is this node"));
        }
        auto theirs = read_bytes32(answer.getChallenge());
        if (!theirs) return Result<void>(tl::unexpected<Error>(std::move(theirs.error())));
        greeting.answerer_challenge = *theirs;
        stats_.node = greeting.answerer;
        stats_.version = answer.getVersion();
        const auto proof = answer.getProof();
        // Before we prove anything to somebody who does not know the secret.
        if (!own_.secret.is_proof(
                PeerSecret::Side::kAnswerer, greeting,
                std::as_bytes(std::span<const kj::byte>(proof.begin(), proof.size())))) {
          return Result<void>(fail(Errc::kRefused, "it has another --peer-secret-file"));
        }
        return enter(greeting);
      });
}

kj::Promise<Result<void>> PeerLink::enter(const PeerSecret::Greeting& greeting) {
  auto request = connection_->gate().enterRequest();
  const Bytes32 proof = own_.secret.prove(PeerSecret::Side::kDialer, greeting);
  request.setProof(data_of(proof));
  return request.send().then(
      [this](capnp::Response<wire::PeerGate::EnterResults>&& answer) -> Result<void> {
        if (!answer.hasPeer()) return tl::unexpected<Error>(read_error(answer.getRefused()));
        PEGA_TRY_LET(connection_->described, read_fabrics(answer));
        connection_->peer = answer.getPeer();
        return {};
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

void PeerLink::disconnect(const Way& way) {
  std::erase(connection_->ways, way);
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
  // Batches of one that is broken fail one after the other.
  if (connection_ == nullptr || !is_ready() || life != this->life() || way != way_) return;
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
  misses_ = 0;
  pause_ = options_.first_pause;
  say(State::kReady, "");
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
    for (const Way& way : std::vector<Way>(connection_->ways)) disconnect(way);
  }
  connection_ = nullptr;
  stats_.lane.clear();
  const Error& why = outcome.error();
  if (stats_.state == State::kSelf) {
    kLog.info("this node is in its own list of peers peer={}", options_.address);
    changed_();
    return kj::READY_NOW;
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
    case State::kConnecting:
    case State::kSelf:
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

void PeerLink::missed() {
  ++stats_.late;
  if (++misses_ >= options_.misses) {
    lost(life(), fmt::format("{} questions without an answer within {}", misses_,
                             format_duration(options_.call_deadline)));
  }
}

void PeerLink::lost(std::uint64_t life, const std::string& why) {
  if (connection_ == nullptr || !is_ready() || life != this->life()) return;
  if (connection_->why_dropped.empty()) connection_->why_dropped = why;
  connection_->dropped.fulfiller->fulfill();
}

/// Waits for an answer until the deadline. `decode` gets the answer also when it comes later; what
/// it then returns reaches nobody.
template <typename T, typename Answer, typename Decode>
kj::Promise<Result<T>> PeerLink::answered(kj::Promise<Answer>&& answer, Duration deadline,
                                          Decode decode) {
  auto pair = kj::newPromiseAndFulfiller<Result<T>>();
  // Shared by both ends of the call, of which one runs.
  auto fulfiller =
      std::make_shared<kj::Own<kj::PromiseFulfiller<Result<T>>>>(kj::mv(pair.fulfiller));
  const std::uint64_t asked_in = life();
  connection_->calls.add(answer
                             .then([this, fulfiller, decode](Answer&& response) mutable {
                               misses_ = 0;  // It lives, whatever it says.
                               Result<T> value = decode(response, (*fulfiller)->isWaiting());
                               return value;
                             })
                             .catch_([this](kj::Exception&& exception) {
                               return Result<T>(tl::unexpected<Error>(failed(exception)));
                             })
                             .then([this, fulfiller, asked_in](Result<T>&& value) {
                               if (!value && value.error().code == Errc::kInternal) {
                                 lost(asked_in, value.error().detail);
                               }
                               (*fulfiller)->fulfill(kj::mv(value));
                             }));
  return pair.promise
      .catch_([](kj::Exception&&) {
        // The connection went, with all that was asked on it.
        return Result<T>(fail(Errc::kPeerLost, "the peer went away"));
      })
      .exclusiveJoin(io_.provider->getTimer().afterDelay(to_kj(deadline)).then([this, deadline]() {
        missed();
        return Result<T>(fail(Errc::kTimeout, "no answer within {}", format_duration(deadline)));
      }));
}

kj::Promise<Result<std::size_t>> PeerLink::locate(const Bytes32& space,
                                                  std::span<const BlockKey> keys) {
  using Answer = capnp::Response<wire::Peer::LocateResults>;
  if (!is_ready()) return Result<std::size_t>(fail(Errc::kPeerLost, "the peer is not ready"));
  if (connection_->network.getCurrentQueueSize() > kMaxQueued) {
    lost(life(), "it does not read what it is sent");
    return Result<std::size_t>(fail(Errc::kPeerLost, "the peer does not read"));
  }
  auto request = connection_->peer->locateRequest(
      capnp::MessageSize{keys_words(keys.size(), BlockKey::kMaxBytes) + 16, 0});
  request.setSpace(data_of(space));
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  return answered<std::size_t>(kj::Promise<Answer>(request.send()), options_.call_deadline,
                               [asked = keys.size()](Answer& answer, bool) -> Result<std::size_t> {
                                 if (answer.getSealed() > asked) {
                                   return fail(Errc::kInternal, "it has {} of {} blocks",
                                               answer.getSealed(), asked);
                                 }
                                 return answer.getSealed();
                               });
}

kj::Promise<Result<LeaseGrant>> PeerLink::lease(const Bytes32& space,
                                                std::span<const BlockKey> keys, std::size_t shards,
                                                std::chrono::milliseconds time) {
  using Answer = capnp::Response<wire::Peer::LeaseResults>;
  if (!is_ready()) return Result<LeaseGrant>(fail(Errc::kPeerLost, "the peer is not ready"));
  auto request = connection_->peer->leaseRequest(
      capnp::MessageSize{keys_words(keys.size(), BlockKey::kMaxBytes) + 16, 0});
  request.setSpace(data_of(space));
  write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
  request.setMilliseconds(static_cast<std::uint32_t>(time.count()));
  return answered<LeaseGrant>(
      kj::Promise<Answer>(request.send()), options_.call_deadline,
      [this, shards, asked = keys.size()](Answer& answer, bool in_time) -> Result<LeaseGrant> {
        auto grant = read_grant(answer, asked, shards);
        if (grant && !in_time && grant->lease != 0) release(grant->lease);
        return grant;
      });
}

kj::Promise<Result<void>> PeerLink::await_job(const JobId& job, Duration patience) {
  using Answer = capnp::Response<wire::Done>;
  if (!is_ready()) return Result<void>(fail(Errc::kPeerLost, "the peer is not ready"));
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
  return answered<void>(kj::mv(sent), asked + options_.call_deadline,
                        [](Answer& answer, bool) { return read_done(answer); });
}

void PeerLink::release(std::uint64_t lease) {
  if (!is_ready()) return;  // It ends by itself.
  auto request = connection_->peer->releaseRequest();
  request.setLease(lease);
  connection_->calls.add(kj::Promise<capnp::Response<wire::Done>>(request.send())
                             .then([](capnp::Response<wire::Done>&&) {},
                                   [this](kj::Exception&& exception) { failed(exception); }));
}

}  // namespace pegaflow
