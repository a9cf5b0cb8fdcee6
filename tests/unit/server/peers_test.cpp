#include "server/peers.h"

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <capnp/rpc-twoparty.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <kj/async-io.h>
#include <kj/async-unix.h>

#include "capnp/codec.h"
#include "capnp/peer.capnp.h"
#include "server/lanes.h"
#include "transport/ucx/ucx_fabric.h"

namespace pegaflow {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Id128 kTheirNode{5, 5};
constexpr JobId kJob{{7, 7}, 3};

::capnp::Data::Reader data_of(const Bytes32& bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

const Lanes::Plan kSockets{.listen = "127.0.0.1:0"};
/// UCX over TCP, as an RDMA lane, and sockets.
const Lanes::Plan kBoth{.cards = {"lo"}, .is_test = true, .listen = "127.0.0.1:0"};

/// What the node at the other end does. Shared by all of its connections.
struct TheirNode {
  std::uint16_t version = kPeerWireMaximum;
  Lanes& lanes;
  /// To each wait for a job; none: it is not answered.
  std::optional<Result<void>> answer = Result<void>();
  std::vector<std::uint32_t> asked_ms{};
  JobId asked_for{};
};

class TheirPeer final : public wire::Peer::Server {
 public:
  explicit TheirPeer(TheirNode& node) : node_(node) {}

 protected:
  kj::Promise<void> awaitJob(AwaitJobContext call) override {
    node_.asked_ms.push_back(call.getParams().getMilliseconds());
    node_.asked_for = read_job(call.getParams().getJob());
    if (!node_.answer) return kj::NEVER_DONE;
    write_done(*node_.answer, call.getResults());
    return kj::READY_NOW;
  }

 private:
  TheirNode& node_;
};

class TheirGate final : public wire::PeerGate::Server {
 public:
  explicit TheirGate(TheirNode& node) : node_(node) {}

 protected:
  kj::Promise<void> greet(GreetContext call) override {
    const auto params = call.getParams();
    const PeerSecret::Greeting greeting{
        .dialer = read_id(params.getNode()),
        .answerer = kTheirNode,
        .dialer_challenge = read_bytes32(params.getChallenge()).value(),
        .answerer_challenge = random_bytes32()};
    auto results = call.getResults();
    results.setMinimum(1);
    results.setMaximum(node_.version);
    results.setVersion(node_.version);
    write_id(kTheirNode, results.initNode());
    results.setChallenge(data_of(greeting.answerer_challenge));
    const Bytes32 proof = PeerSecret().prove(PeerSecret::Side::kAnswerer, greeting);
    results.setProof(data_of(proof));
    return kj::READY_NOW;
  }
  kj::Promise<void> enter(EnterContext call) override {
    auto results = call.getResults();
    results.setPeer(kj::heap<TheirPeer>(node_));
    write_fabrics(node_.lanes.describe(), results);
    return kj::READY_NOW;
  }

 private:
  TheirNode& node_;
};

/// Our links, and one other node that is really dialed; all in the loop of this thread.
struct Fixture {
  explicit Fixture(std::uint16_t version = kPeerWireMaximum, Duration call_deadline = seconds(5),
                   const Lanes::Plan& plan = kSockets)
      : their_lanes(Lanes::open(plan, memory, clock, 4).value()),
        lanes(Lanes::open(plan, memory, clock, 4).value()),
        theirs{.version = version, .lanes = *their_lanes} {
    auto listener =
        io.provider->getNetwork().parseAddress("127.0.0.1", 0).wait(io.waitScope)->listen();
    Peers::Options options;
    options.addresses = {fmt::format("127.0.0.1:{}", listener->getPort())};
    options.link.call_deadline = call_deadline;
    options.link.first_trial_pause = milliseconds(10);
    listening = server.listen(*listener).attach(kj::mv(listener)).eagerlyEvaluate(nullptr);
    reading = read_completions().eagerlyEvaluate(nullptr);
    peers = std::make_unique<Peers>(io, own, options, *lanes, [this]() {
      if (awaited && awaited()) told->fulfill();
    });
    until([this]() { return peers->has_ready(); });
  }
  /// Until a link's news make it so.
  void until(std::function<bool()> is_so) {
    if (is_so()) return;
    auto changed = kj::newPromiseAndFulfiller<void>();
    told = kj::mv(changed.fulfiller);
    awaited = std::move(is_so);
    changed.promise.wait(io.waitScope);
    awaited = nullptr;
  }
  kj::Promise<void> read_completions() {
    return completions.whenBecomesReadable().then([this]() {
      lanes->read_completions([](const Fabric::Completion&) {});
      return read_completions();
    });
  }
  [[nodiscard]] PeerLink& link() { return *peers->links().front(); }
  Result<void> wait(Duration patience = seconds(2), const Id128& node = kTheirNode) {
    return peers->await_job(node, kJob, patience).wait(io.waitScope);
  }

  SteadyClock clock;
  kj::AsyncIoContext io = kj::setupAsyncIo();
  OwnNode own{.node = {6, 6}, .build = "test", .secret = {}};
  std::vector<std::byte> memory{4096};
  std::unique_ptr<Lanes> their_lanes;
  std::unique_ptr<Lanes> lanes;
  kj::UnixEventPort::FdObserver completions{io.unixEventPort, lanes->completions().fd(),
                                            kj::UnixEventPort::FdObserver::OBSERVE_READ};
  TheirNode theirs;
  capnp::TwoPartyServer server{kj::heap<TheirGate>(theirs)};
  kj::Promise<void> listening = nullptr;
  kj::Promise<void> reading = nullptr;
  std::function<bool()> awaited;
  kj::Own<kj::PromiseFulfiller<void>> told;
  std::unique_ptr<Peers> peers;
};

TEST_SUITE("Peers") {
  TEST_CASE("the node of the job is asked, and its answer is the answer") {
    Fixture f;
    CHECK(f.wait());
    CHECK(f.theirs.asked_for == kJob);
    CHECK(f.peers->waits().over == 1);

    for (const Errc code : {Errc::kGone, Errc::kTimeout, Errc::kBusy}) {
      f.theirs.answer = fail(code, "no");
      CHECK(f.wait().error().code == code);
    }
    CHECK(f.peers->waits().gone == 1);
    CHECK(f.peers->waits().timed_out == 1);
    CHECK(f.peers->waits().busy == 1);
    CHECK(f.peers->waits().waiting == 0);
  }

  TEST_CASE("it is asked to answer in time, and never for longer than anybody may wait") {
    Fixture f(kPeerWireMaximum, milliseconds(100));
    REQUIRE(f.wait(seconds(2)));
    REQUIRE(f.wait(milliseconds(200)));
    REQUIRE(f.wait(milliseconds(0)));
    REQUIRE(f.wait(milliseconds(-5)));
    REQUIRE(f.wait(seconds(60)));
    CHECK(f.theirs.asked_ms == std::vector<std::uint32_t>{1900, 150, 0, 0, 9900});
  }

  TEST_CASE("of another node, or another life of this one, nobody is asked") {
    Fixture f;
    CHECK(f.wait(seconds(2), {5, 6}).error().code == Errc::kGone);
    CHECK(f.peers->waits().unknown == 1);
    CHECK(f.theirs.asked_ms.empty());
  }

  TEST_CASE("a node of an older version is not asked") {
    Fixture f(kPeerWireAwaitsJobs - 1);
    CHECK(f.wait().error().code == Errc::kRefused);
    CHECK(f.peers->waits().refused == 1);
    CHECK(f.theirs.asked_ms.empty());
  }

  TEST_CASE("a node that does not answer is given up at the deadline, and lost after some") {
    Fixture f(kPeerWireMaximum, milliseconds(10));
    f.theirs.answer.reset();
    for (int i = 0; i < 3; ++i) CHECK(f.wait(milliseconds(20)).error().code == Errc::kTimeout);
    CHECK(f.peers->links()[0]->stats().late == 3);
    CHECK(f.peers->waits().timed_out == 3);
    // The connection goes, and with it what it still had to answer; then it is dialed again.
    while (f.peers->links()[0]->is_ready()) kj::evalLater([]() {}).wait(f.io.waitScope);
    CHECK(f.wait().error().code == Errc::kGone);
    CHECK(f.peers->waits().unknown == 1);
  }

  TEST_CASE("so many wait at one node, and all are told when it is lost") {
    Fixture f;
    f.theirs.answer.reset();
    kj::Vector<kj::Promise<Result<void>>> waits;
    for (std::size_t i = 0; i < PeerLink::kMaxWaits; ++i) {
      waits.add(f.peers->await_job(kTheirNode, kJob, seconds(10)));
    }
    CHECK(f.wait().error().code == Errc::kBusy);
    CHECK(f.peers->waits().waiting == PeerLink::kMaxWaits);

    // Whoever goes meanwhile leaves nothing here.
    waits.removeLast();
    CHECK(f.peers->waits().waiting == PeerLink::kMaxWaits - 1);
    f.peers->links()[0]->lost(f.peers->links()[0]->life(), "a test");

    for (auto& wait : waits) CHECK(wait.wait(f.io.waitScope).error().code == Errc::kGone);
    CHECK(f.peers->waits().gone == PeerLink::kMaxWaits - 1);
    CHECK(f.peers->waits().waiting == 0);
  }

  TEST_CASE("RDMA is tried beside sockets, left when it breaks, and tried again, in one life") {
    if (!UcxFabric::library_version()) return;  // Built without UCX, or it is not here.
    Fixture f(kPeerWireMaximum, seconds(5), kBoth);
    f.until([&]() { return f.link().stats().lane == "rdma"; });
    const Lender::Way first = f.link().way();
    const std::uint64_t life = f.link().life();

    f.link().way_lost(life, first, "a test");
    CHECK(f.link().is_ready());
    CHECK(f.link().stats().lane == "tcp");
    CHECK(f.link().stats().lane_why == "a test");
    // Other batches of it fail, too.
    f.link().way_lost(life, first, "again");
    CHECK(f.link().stats().lane_falls == 1);
    CHECK(f.link().is_ready());

    f.until([&]() { return f.link().stats().lane == "rdma"; });
    CHECK(f.link().way() != first);
    CHECK(f.link().stats().lane_why.empty());
    CHECK(f.link().life() == life);
    CHECK(f.link().stats().losses == 0);
  }

  TEST_CASE("with sockets alone a way that breaks is the end of that life") {
    Fixture f;
    const std::uint64_t life = f.link().life();

    f.link().way_lost(life, f.link().way(), "a test");

    f.until([&]() { return f.link().stats().losses == 1; });
    f.until([&]() { return f.link().is_ready(); });
    CHECK(f.link().life() == life + 1);
  }
}

}  // namespace
}  // namespace pegaflow
