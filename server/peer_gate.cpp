#include "server/peer_gate.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/log.h"
#include "capnp/codec.h"
#include "server/rpc_error.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"peers"};

constexpr Duration kRefusedLineInterval = std::chrono::seconds(10);

::capnp::Data::Reader data_of(const Bytes32& bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

/// What a peer that has proved itself may ask.
class PeerImpl final : public wire::Peer::Server {
 public:
  PeerImpl(PeerContext& context, const Id128& connection)
      : context_(context), connection_(connection) {}

 protected:
  kj::Promise<void> locate(LocateContext call) override {
    ++context_.counters.locates;
    const auto params = call.getParams();
    const auto space = read_bytes32(params.getSpace());
    const auto keys = read_keys(params.getKeys(), context_.keys);
    auto results = call.getResults(capnp::MessageSize{4, 0});
    // As a lookup it has no error on the wire: who asks nonsense finds nothing.
    if (space && keys) {
      results.setSealed(static_cast<std::uint32_t>(context_.service.present(*space, *keys)));
    }
    return kj::READY_NOW;
  }

  kj::Promise<void> lease(LeaseContext call) override {
    const auto params = call.getParams();
    const std::chrono::milliseconds time = std::min<std::chrono::milliseconds>(
        std::chrono::milliseconds(params.getMilliseconds()), kLongestPeerLease);
    auto grant =
        read_bytes32(params.getSpace()).and_then([&](const Bytes32& space) -> Result<LeaseGrant> {
          PEGA_TRY_LET(const auto keys, read_keys(params.getKeys(), context_.keys));
          return lend(space, keys, time);
        });
    if (!grant) {
      write_error(grant.error(), call.getResults().initError());
    } else {
      const std::size_t words = grant->pages.size() / 2 + grant->checksums.size() + 16;
      write_grant(*grant, call.getResults(capnp::MessageSize{words, 0}));
    }
    context_.background.poke();
    return kj::READY_NOW;
  }

  kj::Promise<void> release(ReleaseContext call) override {
    context_.service.end_lease(LeaseId{call.getParams().getLease()});
    call.getResults().setOk();
    context_.background.poke();
    return kj::READY_NOW;
  }

  kj::Promise<void> awaitJob(AwaitJobContext call) override {
    ++context_.counters.awaits;
    const auto params = call.getParams();
    // The fulfiller outlives the promise where the connection ends first.
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
};

class PeerGateImpl final : public wire::PeerGate::Server {
 public:
  PeerGateImpl(PeerContext& context, const Id128& connection, kj::Function<void()> greeted)
      : context_(context), connection_(connection), greeted_(kj::mv(greeted)) {}

 protected:
  kj::Promise<void> greet(GreetContext call) override {
    const auto params = call.getParams();
    auto results = call.getResults();
    results.setMinimum(kPeerWireMinimum);
    results.setMaximum(kPeerWireMaximum);
    write_id(context_.own.node, results.initNode());
    results.setBuild(context_.own.build.c_str());
    const auto build = params.getBuild();
    build_.assign(build.begin(), std::min<std::size_t>(build.size(), 256));

    const std::uint16_t version = std::min(params.getMaximum(), kPeerWireMaximum);
    if (version < std::max(params.getMinimum(), kPeerWireMinimum)) {
      const bool is_older = params.getMaximum() < kPeerWireMinimum;
      ++context_.counters.refused_version;
      refuse({.code = Errc::kRefused,
              .detail = fmt::format("the peer speaks versions {} to {} between nodes, this one {} "
                                    "to {}: upgrade the {}",
                                    params.getMinimum(), params.getMaximum(), kPeerWireMinimum,
                                    kPeerWireMaximum, is_older ? "peer" : "other one")},
             results.initRefused());
      return kj::READY_NOW;
    }
    const auto challenge = read_bytes32(params.getChallenge());
    if (!challenge || is_greeted_ || has_tried_) {
      refuse({.code = Errc::kInvalidArgument, .detail = "no challenge, or a second greeting"},
             results.initRefused());
      return kj::READY_NOW;
    }
    is_greeted_ = true;
    greeting_ = {.dialer = read_id(params.getNode()),
                 .answerer = context_.own.node,
                 .dialer_challenge = *challenge,
                 .answerer_challenge = random_bytes32()};
    results.setVersion(version);
    results.setChallenge(data_of(greeting_.answerer_challenge));
    const Bytes32 proof = context_.own.secret.prove(PeerSecret::Side::kAnswerer, greeting_);
    results.setProof(data_of(proof));
    return kj::READY_NOW;
  }

  kj::Promise<void> enter(EnterContext call) override {
    const auto proof = call.getParams().getProof();
    // One try a greeting.
    const bool may_try = std::exchange(is_greeted_, false) && !has_tried_;
    has_tried_ = true;
    if (!may_try || !context_.own.secret.is_proof(
                        PeerSecret::Side::kDialer, greeting_,
                        std::as_bytes(std::span<const kj::byte>(proof.begin(), proof.size())))) {
      ++context_.counters.refused_secret;
      refuse({.code = Errc::kRefused, .detail = "it has another --peer-secret-file"},
             call.getResults().initRefused());
      return kj::READY_NOW;
    }
    ++context_.counters.greetings;
    kLog.info("peer entered node={} build=\"{}\"", to_string(greeting_.dialer), build_);
    auto results = call.getResults();
    results.setPeer(kj::heap<PeerImpl>(context_, connection_));
    write_fabrics(context_.lanes.describe(), results);
    greeted_();
    return kj::READY_NOW;
  }

 private:
  void refuse(const Error& why, wire::Error::Builder to) {
    write_error(why, to);
    const TimePoint now = context_.clock.now();
    if (context_.last_refused_line && now - *context_.last_refused_line < kRefusedLineInterval) {
      return;
    }
    context_.last_refused_line = now;
    kLog.error("peer refused build=\"{}\" reason=\"{}\"", build_, why.detail);
  }

  PeerContext& context_;
  Id128 connection_;
  kj::Function<void()> greeted_;
  PeerSecret::Greeting greeting_;
  std::string build_;
  bool is_greeted_ = false;
  bool has_tried_ = false;
};

}  // namespace

RpcServer::Service peer_service(PeerContext& context) {
  return {.bootstrap =
              [&context](const Id128& connection, const Peer&, kj::Function<void()> greeted) {
                return wire::PeerGate::Client(
                    kj::heap<PeerGateImpl>(context, connection, kj::mv(greeted)));
              },
          // What was lent stays lent until its time: reads may be under way.
          .ended = [&context](const Id128& connection) { context.service.peer_left(connection); },
          .has_users = false};
}

}  // namespace pegaflow
