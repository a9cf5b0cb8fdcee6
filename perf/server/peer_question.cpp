#include "perf/server/peer_question.h"

#include <chrono>
#include <optional>
#include <utility>

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include "capnp/peer.capnp.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/peer_codec.h"
#include "cluster/peer_proof.h"

namespace pegaflow::perf {
namespace {

capnp::Data::Reader data_of(const Bytes32& bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

Error lost(const kj::Exception& exception) {
  return {.code = Errc::kPeerLost, .detail = exception.getDescription().cStr()};
}

}  // namespace

/// The parts of a connection; destroyed in reverse order.
struct PeerQuestion::Connection {
  explicit Connection(const std::string& address)
      : stream(io.provider->getNetwork()
                   .parseAddress(address.c_str())
                   .wait(io.waitScope)
                   ->connect()
                   .wait(io.waitScope)),
        client(*stream) {}

  Result<void> enter() {
    auto gate = client.bootstrap().castAs<wire::PeerGate>();
    cluster::PeerSecret::Greeting greeting{.dialer = Id128::random(),
                                           .answerer = {},
                                           .dialer_challenge = cluster::random_bytes32(),
                                           .answerer_challenge = {}};
    auto greet = gate.greetRequest();
    greet.setMinimum(kPeerWireKnowsEpochs);
    greet.setMaximum(kPeerWireMaximum);
    write_id(greeting.dialer, greet.initNode());
    greet.setBuild("pegaflow-perf");
    greet.setChallenge(data_of(greeting.dialer_challenge));
    const auto greeted = greet.send().wait(io.waitScope);
    if (greeted.getVersion() == 0) return tl::unexpected<Error>(read_error(greeted.getRefused()));
    greeting.answerer = read_id(greeted.getNode());
    PEGA_TRY_LET(greeting.answerer_challenge, read_bytes32(greeted.getChallenge()));
    auto enter = gate.enterRequest();
    const Bytes32 proof = cluster::PeerSecret().prove(cluster::PeerSecret::Side::kDialer, greeting);
    enter.setProof(data_of(proof));
    auto entered = enter.send().wait(io.waitScope);
    if (!entered.hasPeer()) return tl::unexpected<Error>(read_error(entered.getRefused()));
    peer = entered.getPeer();
    return {};
  }

  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::Own<kj::AsyncIoStream> stream;
  capnp::TwoPartyClient client;
  std::optional<wire::Peer::Client> peer;
};

PeerQuestion::PeerQuestion(std::unique_ptr<Connection> connection)
    : connection_(std::move(connection)) {}
PeerQuestion::~PeerQuestion() = default;

Result<std::unique_ptr<PeerQuestion>> PeerQuestion::greet(const std::string& address) {
  std::unique_ptr<Connection> made;
  Result<void> entered;
  KJ_IF_MAYBE (exception, kj::runCatchingExceptions([&] {
                 made = std::make_unique<Connection>(address);
                 entered = made->enter();
               })) {
    return tl::unexpected<Error>(lost(*exception));
  }
  if (!entered) return tl::unexpected<Error>(std::move(entered.error()));
  return std::unique_ptr<PeerQuestion>(new PeerQuestion(std::move(made)));
}

Result<Duration> PeerQuestion::confirm() {
  const auto begin = std::chrono::steady_clock::now();
  KJ_IF_MAYBE (exception, kj::runCatchingExceptions([&] {
                 auto request = connection_->peer->confirmRequest();
                 request.setLease(1);
                 (void)request.send().wait(connection_->io.waitScope);
               })) {
    return tl::unexpected<Error>(lost(*exception));
  }
  return std::chrono::steady_clock::now() - begin;
}

}  // namespace pegaflow::perf
