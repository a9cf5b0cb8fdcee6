#include "server/rpc/peer_gate.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/log.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/rpc_error.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"peers"};

/// Limit of each text that a dialer reports about itself.
constexpr std::size_t kMostTextBytes = 256;

/// The first bytes of a text from a dialer that has not proved itself.
std::string beginning_of(::capnp::Text::Reader text) {
  return {text.begin(), std::min<std::size_t>(text.size(), kMostTextBytes)};
}

/// The calls of a peer that has proved itself.
class PeerImpl final : public wire::Peer::Server {
 public:
  PeerImpl(PeerContext& context, const Id128& connection, std::uint16_t version)
      : context_(context), connection_(connection), version_(version) {}

 protected:
  kj::Promise<void> locate(LocateContext call) override {
    ++context_.counters.locates;
    const auto params = call.getParams();
    const auto space = read_bytes32(params.getSpace());
    const auto keys = read_keys(params.getKeys(), context_.keys);
    auto results = call.getResults(capnp::MessageSize{8, 0});
    // As a lookup it has no error on the wire: an invalid request finds nothing.
    if (space && keys && meets(*space, params.getEpoch())) {
      results.setSealed(static_cast<std::uint32_t>(context_.service.present(*space, *keys)));
    }
    if (space) write_epoch(context_.service.epochs().of(*space), results.initEpoch());
    return kj::READY_NOW;
  }

  kj::Promise<void> locateEach(LocateEachContext call) override {
    ++context_.counters.locates;
    const auto params = call.getParams();
    const auto space = read_bytes32(params.getSpace());
    const auto keys = read_keys(params.getKeys(), context_.keys);
    auto results = call.getResults();
    if (space && keys && meets(*space, params.getEpoch())) {
      const auto present = pack_present(context_.service.present_each(*space, *keys));
      auto bits = results.initPresent(static_cast<unsigned>(present.size()));
      std::transform(present.begin(), present.end(), bits.begin(), std::to_integer<kj::byte>);
    }
    if (space) write_epoch(context_.service.epochs().of(*space), results.initEpoch());
    return kj::READY_NOW;
  }

  kj::Promise<void> lease(LeaseContext call) override {
    const auto params = call.getParams();
    const std::chrono::milliseconds time = std::min<std::chrono::milliseconds>(
        std::chrono::milliseconds(params.getMilliseconds()), kLongestPeerLease);
    auto grant =
        read_bytes32(params.getSpace()).and_then([&](const Bytes32& space) -> Result<LeaseGrant> {
          PEGA_TRY_LET(const auto keys, read_keys(params.getKeys(), context_.keys));
          if (!meets(space, params.getEpoch())) return LeaseGrant{};
          return lend(space, keys, time);
        });
    const std::size_t words =
        grant ? grant->pages.size() / 2 + grant->checksums.size() + 24 : std::size_t{256};
    auto results = call.getResults(capnp::MessageSize{words, 0});
    if (!grant) {
      write_error(grant.error(), results.initError());
    } else {
      write_grant(*grant, results);
    }
    if (const auto space = read_bytes32(params.getSpace())) {
      write_epoch(context_.service.epochs().of(*space), results.initEpoch());
    }
    context_.background.poke();
    return kj::READY_NOW;
  }

  kj::Promise<void> release(ReleaseContext call) override {
    context_.service.end_lease(engine::LeaseId{call.getParams().getLease()});
    call.getResults().setOk();
    context_.background.poke();
    return kj::READY_NOW;
  }

  kj::Promise<void> confirm(ConfirmContext call) override {
    call.getResults().setHeld(
        context_.service.is_lent(engine::LeaseId{call.getParams().getLease()}));
    return kj::READY_NOW;
  }

  kj::Promise<void> exchange(ExchangeContext call) override {
    if (const auto theirs = read_epochs(call.getParams())) context_.service.epochs().learn(*theirs);
    write_epochs(context_.service.epochs().known(), call.getResults());
    return kj::READY_NOW;
  }

  kj::Promise<void> reset(ResetContext call) override {
    const auto params = call.getParams();
    const auto space = read_bytes32(params.getSpace());
    const auto theirs = read_epoch(params.getEpoch());
    if (space && theirs) {
      context_.service.epochs().learn(*space, *theirs);
      write_epoch(context_.service.epochs().of(*space), call.getResults().initEpoch());
    }
    return kj::READY_NOW;
  }

  kj::Promise<void> watch(WatchContext call) override {
    const auto params = call.getParams();
    if (params.hasEpochs()) {
      if (const auto theirs = read_epochs(params.getEpochs())) {
        context_.service.epochs().learn(*theirs);
      }
    }
    const std::uint64_t seen = params.getSeen();
    const std::chrono::milliseconds patience = std::min<std::chrono::milliseconds>(
        std::chrono::milliseconds(params.getMilliseconds()), kLongestPeerWatch);
    return context_.watches.await_news(connection_, seen, patience)
        .then([&epochs = context_.service.epochs(), seen, call]() mutable {
          auto results = call.getResults();
          results.setChanges(epochs.changes());
          if (epochs.changes() != seen) write_epochs(epochs.known(), results.initEpochs());
        });
  }

  kj::Promise<void> awaitJob(AwaitJobContext call) override {
    ++context_.counters.awaits;
    const auto params = call.getParams();
    // The fulfiller outlives the promise if the connection ends first.
    auto answered = kj::newPromiseAndFulfiller<Result<void>>();
    auto fulfiller =
        std::make_shared<kj::Own<kj::PromiseFulfiller<Result<void>>>>(kj::mv(answered.fulfiller));
    context_.service.await_job_for(
        connection_, read_job(params.getJob()), std::chrono::milliseconds(params.getMilliseconds()),
        [fulfiller](Result<void> result) { (*fulfiller)->fulfill(std::move(result)); });
    context_.background.poke();  // A deadline to keep.
    return answered.promise.then(
        [call](Result<void>&& result) mutable { write_done(result, call.getResults()); });
  }

 private:
  /// Whether the reader's epoch of the namespace is that of this node; both take the newer one.
  [[nodiscard]] bool meets(const Bytes32& space, wire::Epoch::Reader epoch) {
    if (version_ < kPeerWireKnowsEpochs) return context_.service.epochs().of(space).is_zero();
    const auto theirs = read_epoch(epoch);
    return theirs && context_.service.meets(space, *theirs);
  }

  Result<LeaseGrant> lend(const Bytes32& space, std::span<const BlockKey> keys,
                          std::chrono::milliseconds time) {
    PEGA_TRY_LET(CacheService::Lent lent, context_.service.lend(space, keys, time));
    if (lent.pages.empty()) return LeaseGrant{};
    // The store keeps the blocks a margin longer than the fabric lets them be read.
    const TimePoint until = context_.clock.now() + time;
    if (until > context_.lent_until) {
      if (auto done = context_.lanes.lend(until); !done) {
        context_.service.end_lease(lent.lease);
        return tl::unexpected<Error>(std::move(done.error()));
      }
      context_.lent_until = until;
    }
    ++context_.counters.leases;
    return LeaseGrant{.lease = static_cast<std::uint64_t>(lent.lease),
                      .granted = time,
                      .pages = std::move(lent.pages),
                      .checksums = std::move(lent.checksums)};
  }

  PeerContext& context_;
  Id128 connection_;
  std::uint16_t version_;
};

class PeerGateImpl final : public wire::PeerGate::Server {
 public:
  PeerGateImpl(PeerContext& context, const Id128& connection, const Peer& peer,
               kj::Function<void()> greeted)
      : context_(context), connection_(connection), greeted_(kj::mv(greeted)) {
    dialer_.host = peer.address;
  }

 protected:
  kj::Promise<void> greet(GreetContext call) override {
    const auto params = call.getParams();
    auto results = call.getResults();
    results.setMinimum(kPeerWireMinimum);
    results.setMaximum(kPeerWireMaximum);
    write_id(context_.own.node, results.initNode());
    results.setBuild(context_.own.build.c_str());
    build_ = beginning_of(params.getBuild());

    const std::uint16_t version = std::min(params.getMaximum(), kPeerWireMaximum);
    if (version < std::max(params.getMinimum(), kPeerWireMinimum)) {
      const bool is_older = params.getMaximum() < kPeerWireMinimum;
      ++context_.counters.refused_version;
      refuse({.code = Errc::kRefused,
              .detail = fmt::format("the peer speaks versions {} to {} between nodes, this node {} "
                                    "to {}: upgrade {}",
                                    params.getMinimum(), params.getMaximum(), kPeerWireMinimum,
                                    kPeerWireMaximum, is_older ? "the peer" : "this node")},
             results.initRefused());
      return kj::READY_NOW;
    }
    const auto challenge = read_bytes32(params.getChallenge());
    if (!challenge || is_greeted_ || has_tried_) {
      refuse(
          {.code = Errc::kInvalidArgument, .detail = "greet: no challenge, or a second greeting"},
          results.initRefused());
      return kj::READY_NOW;
    }
    is_greeted_ = true;
    greeting_ = {.dialer = read_id(params.getNode()),
                 .answerer = context_.own.node,
                 .dialer_challenge = *challenge,
                 .answerer_challenge = cluster::random_bytes32()};
    dialer_.node = greeting_.dialer;
    dialer_.listen = beginning_of(params.getListen());
    dialer_.dialed = beginning_of(params.getDialed());
    results.setVersion(version);
    results.setFeatures(kPeerFeatures);
    version_ = version;
    results.setChallenge(data_of(greeting_.answerer_challenge));
    const Bytes32 proof =
        context_.own.secrets.first().prove(cluster::PeerSecret::Side::kAnswerer, greeting_);
    results.setProof(data_of(proof));
    return kj::READY_NOW;
  }

  kj::Promise<void> enter(EnterContext call) override {
    const auto proof = call.getParams().getProof();
    // One try a greeting.
    const bool may_try = std::exchange(is_greeted_, false) && !has_tried_;
    has_tried_ = true;
    if (!may_try || context_.own.secrets.find(cluster::PeerSecret::Side::kDialer, greeting_,
                                              std::as_bytes(std::span<const kj::byte>(
                                                  proof.begin(), proof.size()))) == nullptr) {
      ++context_.counters.refused_secret;
      refuse({.code = Errc::kRefused, .detail = "the peer has another --peer-secret-file"},
             call.getResults().initRefused());
      return kj::READY_NOW;
    }
    ++context_.counters.greetings;
    kLog.info("peer entered node={} address={} build=\"{}\"", to_string(greeting_.dialer),
              dialer_.host, build_);
    replace_older();
    auto results = call.getResults();
    results.setPeer(kj::heap<PeerImpl>(context_, connection_, version_));
    write_fabrics(context_.lanes.describe(), results);
    greeted_();
    return kj::READY_NOW;
  }

 private:
  /// A dialer that lost its connection uses none of the older ones, but the kernel here may not
  /// have detected that: without this they would add up until the limit of connections is reached.
  void replace_older() {
    for (const auto& [connection, older] : context_.entered) {
      if (!older.is_replaced_by(dialer_)) continue;
      ++context_.counters.replaced;
      kLog.debug("connection replaced by a newer one node={} address={}", to_string(older.node),
                 older.host);
      context_.end_connection(connection);
    }
    context_.entered.insert_or_assign(connection_, dialer_);
    context_.watches.entered(connection_, {.node = dialer_.node, .name = dialer_.name()});
  }

  void refuse(const Error& why, wire::Error::Builder to) {
    write_error(why, to);
    const auto suppressed = context_.refused_lines.pass(context_.clock.now());
    if (!suppressed) return;
    kLog.error("peer rejected address={} build=\"{}\" suppressed={} reason=\"{}\"", dialer_.host,
               build_, *suppressed, why.detail);
  }

  PeerContext& context_;
  Id128 connection_;
  kj::Function<void()> greeted_;
  cluster::PeerSecret::Greeting greeting_;
  PeerContext::Entered dialer_;
  std::string build_;
  std::uint16_t version_ = 0;
  bool is_greeted_ = false;
  bool has_tried_ = false;
};

}  // namespace

RpcServer::Service peer_service(PeerContext& context) {
  return {.bootstrap =
              [&context](const Id128& connection, const Peer& peer, kj::Function<void()> greeted) {
                return wire::PeerGate::Client(
                    kj::heap<PeerGateImpl>(context, connection, peer, kj::mv(greeted)));
              },
          // What was lent stays lent until its time: reads may be in flight.
          .ended =
              [&context](const Id128& connection) {
                context.entered.erase(connection);
                context.watches.left(connection);
                context.service.peer_left(connection);
              },
          .has_users = false};
}

}  // namespace pegaflow::server
