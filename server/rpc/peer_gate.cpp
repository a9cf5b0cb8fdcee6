#include "server/rpc/peer_gate.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/log.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/rpc_error.h"
#include "server/direct/peer_offers.h"
#include "server/ssd/staging.h"

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
  /// `features` are the reader's.
  PeerImpl(PeerContext& context, const Id128& connection, std::uint16_t version,
           std::uint64_t features)
      : context_(context), connection_(connection), version_(version), features_(features) {}

 protected:
  kj::Promise<void> locate(LocateContext call) override {
    ++context_.counters.locates;
    const auto params = call.getParams();
    const auto space = read_bytes32(params.getSpace());
    const auto keys = read_keys(params.getKeys(), context_.keys);
    // As a lookup it has no error on the wire: an invalid request finds nothing.
    const bool finds = space && keys && meets(*space, params.getEpoch());
    if (finds && has_disks()) {
      return context_.staging->locate(*space, *keys)
          .then([this, call, space = *space](cluster::Lender::Prefix&& found) mutable {
            auto results = call.getResults();
            // It may have been reset meanwhile.
            if (meets(space, call.getParams().getEpoch())) {
              results.setSealed(static_cast<std::uint32_t>(found.blocks));
              if (found.on_disks.blocks != 0) write_on_disks(found.on_disks, results.initOnDisks());
            }
            write_epoch(context_.service.epochs().of(space), results.initEpoch());
          });
    }
    auto results = call.getResults(capnp::MessageSize{8, 0});
    if (finds) {
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
    const bool finds = space && keys && meets(*space, params.getEpoch());
    if (finds && has_disks()) {
      return context_.staging->locate_each(*space, *keys)
          .then([this, call, space = *space](cluster::Lender::Present&& found) mutable {
            auto results = call.getResults();
            if (meets(space, call.getParams().getEpoch())) {
              write_each(found.has, results);
              if (found.on_disks.blocks != 0) write_on_disks(found.on_disks, results.initOnDisks());
            }
            write_epoch(context_.service.epochs().of(space), results.initEpoch());
          });
    }
    auto results = call.getResults();
    if (finds) write_each(context_.service.present_each(*space, *keys), results);
    if (space) write_epoch(context_.service.epochs().of(*space), results.initEpoch());
    return kj::READY_NOW;
  }

  kj::Promise<void> lease(LeaseContext call) override {
    const auto params = call.getParams();
    const std::chrono::milliseconds time = std::min<std::chrono::milliseconds>(
        std::chrono::milliseconds(params.getMilliseconds()), kLongestPeerLease);
    const auto space = read_bytes32(params.getSpace());
    if (space && has_disks() && params.getStaging() != 0) return lease_pending(call, *space, time);
    std::span<const BlockKey> behind;
    auto grant = space.and_then([&](const Bytes32& name) -> Result<LeaseGrant> {
      PEGA_TRY_LET(const auto keys, read_keys(params.getKeys(), context_.keys));
      if (!meets(name, params.getEpoch())) return LeaseGrant{};
      auto lent = lend(name, keys, time);
      if (lent) behind = keys.subspan(lent->blocks);
      return std::move(lent).map([](Lent&& made) { return std::move(made.grant); });
    });
    if (!grant || behind.empty() || !has_disks()) {
      answer(call, grant);
      return kj::READY_NOW;
    }
    return context_.staging->begin(connection_, *space, behind)
        .then([this, call, grant = std::move(grant)](Staging::Pending&& pending) mutable {
          grant->pending = pending.blocks;
          grant->staging = pending.number;
          answer(call, grant);
        });
  }

  kj::Promise<void> release(ReleaseContext call) override {
    const auto params = call.getParams();
    context_.service.end_lease(engine::LeaseId{params.getLease()});
    if (has_disks()) context_.staging->end(connection_, params.getStaging());
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
    const JobId job = read_job(params.getJob());
    const auto until = params.getBegun() ? JobWaits::Until::kBegun : JobWaits::Until::kOver;
    context_.service.await_job_for(
        connection_, job, std::chrono::milliseconds(params.getMilliseconds()),
        [fulfiller](Result<void> result) { (*fulfiller)->fulfill(std::move(result)); }, until);
    context_.background.poke();  // A deadline to keep.
    return answered.promise.then([this, call, name = job.scheduler,
                                  until](Result<void>&& result) mutable {
      write_reached({.ended = kj::mv(result), .up_to = context_.service.jobs_reached(name, until)},
                    call.getResults());
    });
  }

  kj::Promise<void> offered(OfferedContext call) override {
    ++context_.counters.locates;
    const auto params = call.getParams();
    const auto space = read_bytes32(params.getSpace());
    const auto keys = read_keys(params.getKeys(), context_.keys);
    auto results = call.getResults(capnp::MessageSize{16, 0});
    // As a lookup it has no error on the wire: an invalid request finds nothing.
    const auto readers = read_readers(params.getReaders());
    if (space && keys && readers && meets(*space, params.getEpoch())) {
      const PeerOffer offer = context_.offers.offered(*space, *keys, *readers);
      results.setSealed(static_cast<std::uint32_t>(offer.sealed));
      results.setOffered(static_cast<std::uint32_t>(offer.offered));
    }
    if (space) write_epoch(context_.service.epochs().of(*space), results.initEpoch());
    return kj::READY_NOW;
  }

  kj::Promise<void> openNext(OpenNextContext call) override {
    const auto params = call.getParams();
    const auto space = read_bytes32(params.getSpace());
    auto opened = space.and_then([&](const Bytes32& name) -> Result<PeerOffers::Call> {
      PEGA_TRY_LET(const auto keys, read_keys(params.getKeys(), context_.keys));
      PEGA_TRY_LET(PeerQuestion question, read_question(params));
      if (keys.empty()) return fail(Errc::kInvalidArgument, "openNext without a key");
      const auto leading = keys.first(std::min(keys.size(), CacheService::kClaimSlice));
      return PeerOffers::Call{.connection = connection_,
                              .space = name,
                              .keys = {leading.begin(), leading.end()},
                              .question = std::move(question)};
    });
    if (!opened) {
      write_error(opened.error(), call.getResults().initError());
      return kj::READY_NOW;
    }
    if (!meets(*space, params.getEpoch())) {
      write_epoch(context_.service.epochs().of(*space), call.getResults().initEpoch());
      return kj::READY_NOW;
    }
    return context_.offers.open_next(std::move(*opened))
        .then([this, call, space = *space](Result<PeerPiece>&& piece) mutable {
          auto results = call.getResults();
          // It may have been reset meanwhile: then the reader discards the answer, and ends the
          // read.
          write_epoch(context_.service.epochs().of(space), results.initEpoch());
          if (piece) {
            write_piece(*piece, results);
          } else {
            write_error(piece.error(), results.initError());
          }
        });
  }

  kj::Promise<void> endRead(EndReadContext call) override {
    context_.offers.end_read(connection_, call.getParams().getRead());
    return kj::READY_NOW;
  }

 private:
  /// Whether the reader's epoch of the namespace is that of this node; both take the newer one.
  [[nodiscard]] bool meets(const Bytes32& space, wire::Epoch::Reader epoch) {
    if (version_ < kPeerWireKnowsEpochs) return context_.service.epochs().of(space).is_zero();
    const auto theirs = read_epoch(epoch);
    return theirs && context_.service.meets(space, *theirs);
  }

  /// Whether the reader may learn of blocks that are only on disks.
  [[nodiscard]] bool has_disks() const {
    return context_.staging != nullptr && (features_ & kPeerReadsDisks) != 0;
  }

  static void write_each(const std::vector<bool>& has,
                         wire::Peer::LocateEachResults::Builder results) {
    const auto present = pack_present(has);
    auto bits = results.initPresent(static_cast<unsigned>(present.size()));
    std::transform(present.begin(), present.end(), bits.begin(), std::to_integer<kj::byte>);
  }

  /// Answers a request for blocks, with the epoch that their namespace has now.
  void answer(LeaseContext& call, const Result<LeaseGrant>& grant) {
    const std::size_t words =
        grant ? grant->pages.size() / 2 + grant->checksums.size() + 32 : std::size_t{256};
    auto results = call.getResults(capnp::MessageSize{words, 0});
    if (!grant) {
      write_error(grant.error(), results.initError());
    } else {
      write_grant(*grant, results);
    }
    if (const auto space = read_bytes32(call.getParams().getSpace())) {
      write_epoch(context_.service.epochs().of(*space), results.initEpoch());
    }
    context_.background.poke();
  }

  /// The next blocks of a staging, once they have been read.
  kj::Promise<void> lease_pending(LeaseContext call, const Bytes32& space,
                                  std::chrono::milliseconds time) {
    const std::uint64_t number = call.getParams().getStaging();
    const std::chrono::milliseconds patience = std::min<std::chrono::milliseconds>(
        std::chrono::milliseconds(call.getParams().getPatience()), kLongestPeerPatience);
    return context_.staging->await_next(connection_, number, patience)
        .then([this, call, space, time, number](Staging::Ready&& ready) mutable {
          Result<LeaseGrant> grant;
          Staging::Pending left;
          // It may have been reset meanwhile.
          if (meets(space, call.getParams().getEpoch()) &&
              (ready.keys.empty() || ready.space == space)) {
            auto made = lend(space, ready.keys, time);
            left = context_.staging->lent(connection_, number, ready.keys.size(),
                                          made ? made->blocks : 0);
            grant = std::move(made).map([](Lent&& lent) { return std::move(lent.grant); });
          } else {
            context_.staging->end(connection_, number);
          }
          if (grant) {
            grant->pending = left.blocks;
            grant->staging = left.number;
          }
          answer(call, grant);
        });
  }

  struct Lent {
    LeaseGrant grant;
    std::size_t blocks = 0;
  };
  Result<Lent> lend(const Bytes32& space, std::span<const BlockKey> keys,
                    std::chrono::milliseconds time) {
    if (keys.empty()) return Lent{};
    PEGA_TRY_LET(CacheService::Lent lent, context_.service.lend(space, keys, time));
    if (lent.pages.empty()) return Lent{};
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
    return Lent{.grant = {.lease = static_cast<std::uint64_t>(lent.lease),
                          .granted = time,
                          .pages = std::move(lent.pages),
                          .checksums = std::move(lent.checksums)},
                .blocks = lent.blocks};
  }

  PeerContext& context_;
  Id128 connection_;
  std::uint16_t version_;
  std::uint64_t features_;
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
    features_ = params.getFeatures();
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
    results.setPeer(kj::heap<PeerImpl>(context_, connection_, version_, features_));
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
  std::uint64_t features_ = 0;  ///< The dialer's.
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
                context.offers.left(connection);
                context.service.peer_left(connection);
                if (context.staging != nullptr) context.staging->peer_left(connection);
              },
          .has_users = false};
}

}  // namespace pegaflow::server
