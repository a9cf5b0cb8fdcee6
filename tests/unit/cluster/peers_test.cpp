#include "cluster/peers.h"

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

#include "capnp/peer.capnp.h"
#include "capnp/wire/codec.h"
#include "cluster/lanes.h"
#include "server/nodes.h"
#include "server/rpc/peer_gate.h"
#include "tests/support/skip.h"
#include "transport/ucx/ucx_fabric.h"

namespace pegaflow::cluster {
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

/// The behavior of the node at the other end. Shared by all of its connections.
struct TheirNode {
  std::uint16_t version = kPeerWireMaximum;
  Lanes& lanes;
  std::uint64_t features = 0;
  /// To each wait for a job; none: it is not answered, or when answer_owed() is called.
  std::optional<Result<void>> answer = Result<void>();
  std::uint64_t up_to = 0;  ///< In these answers.
  std::vector<kj::Own<kj::PromiseFulfiller<void>>> owed{};
  Id128 node = kTheirNode;
  std::vector<std::uint64_t> released{};
  std::vector<std::string> dialed{};

  [[nodiscard]] JobsReached reached() const { return {.ended = *answer, .up_to = up_to}; }
  void answer_owed() {
    answer = Result<void>();
    for (auto& one : owed) one->fulfill();
    owed.clear();
  }
  std::vector<std::uint32_t> asked_ms{};
  JobId asked_for{};
  Epochs epochs{};
  std::function<void()> exchanging{};  ///< Called while a dialer waits for its epochs.
  std::size_t locates = 0;
  bool knows_secret = true;
  bool answers_releases = true;
};

class TheirPeer final : public wire::Peer::Server {
 public:
  explicit TheirPeer(TheirNode& node) : node_(node) {}

 protected:
  kj::Promise<void> exchange(ExchangeContext call) override {
    node_.epochs.learn(read_epochs(call.getParams()).value());
    write_epochs(node_.epochs.known(), call.getResults());
    if (node_.exchanging) node_.exchanging();
    return kj::READY_NOW;
  }
  kj::Promise<void> locate(LocateContext call) override {
    ++node_.locates;
    const Bytes32 space = read_bytes32(call.getParams().getSpace()).value();
    auto results = call.getResults();
    results.setSealed(1);
    write_epoch(node_.epochs.of(space), results.initEpoch());
    return kj::READY_NOW;
  }
  /// Has the second block only.
  kj::Promise<void> locateEach(LocateEachContext call) override {
    const Bytes32 space = read_bytes32(call.getParams().getSpace()).value();
    auto results = call.getResults();
    results.initPresent(1)[0] = 0b10;
    write_epoch(node_.epochs.of(space), results.initEpoch());
    return kj::READY_NOW;
  }
  kj::Promise<void> awaitJob(AwaitJobContext call) override {
    node_.asked_ms.push_back(call.getParams().getMilliseconds());
    node_.asked_for = read_job(call.getParams().getJob());
    if (!node_.answer) {
      auto later = kj::newPromiseAndFulfiller<void>();
      node_.owed.push_back(kj::mv(later.fulfiller));
      return later.promise.then(
          [this, call]() mutable { write_reached(node_.reached(), call.getResults()); });
    }
    write_reached(node_.reached(), call.getResults());
    return kj::READY_NOW;
  }
  kj::Promise<void> release(ReleaseContext call) override {
    node_.released.push_back(call.getParams().getLease());
    if (!node_.answers_releases) return kj::NEVER_DONE;
    call.getResults().setOk();
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
        .answerer = node_.node,
        .dialer_challenge = read_bytes32(params.getChallenge()).value(),
        .answerer_challenge = random_bytes32()};
    auto results = call.getResults();
    results.setMinimum(1);
    results.setMaximum(node_.version);
    results.setVersion(node_.version);
    results.setFeatures(node_.features);
    write_id(node_.node, results.initNode());
    node_.dialed.emplace_back(params.getDialed().cStr());
    results.setChallenge(data_of(greeting.answerer_challenge));
    Bytes32 proof = PeerSecret().prove(PeerSecret::Side::kAnswerer, greeting);
    if (!node_.knows_secret) proof = Bytes32{};
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
                   const Lanes::Plan& plan = kSockets,
                   Duration least_silence = PeerLink::Options().least_silence,
                   std::uint64_t features = 0)
      : their_lanes(Lanes::open(plan, memory, clock, 4).value()),
        lanes(Lanes::open(plan, memory, clock, 4).value()),
        theirs{.version = version, .lanes = *their_lanes, .features = features} {
    auto listener =
        io.provider->getNetwork().parseAddress("127.0.0.1", 0).wait(io.waitScope)->listen();
    Peers::Options options;
    options.addresses = {fmt::format("127.0.0.1:{}", listener->getPort())};
    options.link.call_deadline = call_deadline;
    options.link.least_silence = least_silence;
    options.link.first_trial_pause = milliseconds(10);
    options.link.longest_pause = milliseconds(200);
    listening = server.listen(*listener).attach(kj::mv(listener)).eagerlyEvaluate(nullptr);
    reading = read_completions().eagerlyEvaluate(nullptr);
    peers = std::make_unique<Peers>(io, own, epochs, options, *lanes, [this]() {
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
  /// Until something else than a link's news makes it so.
  template <typename Condition>
  void turn_until(Condition is_so) {
    const TimePoint end = clock.now() + seconds(60);
    while (!is_so()) {
      REQUIRE(clock.now() < end);
      io.provider->getTimer().afterDelay(1 * kj::MILLISECONDS).wait(io.waitScope);
    }
  }
  [[nodiscard]] PeerLink& link() { return *peers->links().front(); }
  Result<void> wait(Duration patience = seconds(2), const Id128& node = kTheirNode) {
    return peers->await_job(node, kJob, patience).wait(io.waitScope).ended;
  }

  SteadyClock clock;
  kj::AsyncIoContext io = kj::setupAsyncIo();
  OwnNode own{.node = {6, 6}, .build = "test", .secrets = {}};
  Epochs epochs;
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

TEST_SUITE("connections of peers") {
  TEST_CASE("a greeting replaces the older connection of the same link, and of no other") {
    using Entered = server::PeerContext::Entered;
    const Entered old{.node = {1, 1}, .host = "10.0.0.7", .listen = "a:50055", .dialed = "b:50055"};
    Entered newer = old;
    CHECK(old.is_replaced_by(newer));
    newer.host = "10.0.0.8";  // Its address was changed by who is between the two.
    CHECK(old.is_replaced_by(newer));
    newer = old;
    newer.node = {1, 2};  // Another node behind the same proxy, or a restarted one.
    CHECK_FALSE(old.is_replaced_by(newer));
    newer = old;
    newer.dialed = "other-name-of-b:50055";  // A second link of that node, by another name.
    CHECK_FALSE(old.is_replaced_by(newer));

    // A node that only reads has no address of its own.
    Entered reader{.node = {1, 1}, .host = "10.0.0.7", .listen = "", .dialed = "b:50055"};
    Entered other_reader = reader;
    CHECK(reader.is_replaced_by(other_reader));
    other_reader.node = {2, 2};
    CHECK_FALSE(reader.is_replaced_by(other_reader));
    // Nodes of before say neither.
    const Entered silent{.node = {1, 1}, .host = "10.0.0.7", .listen = "", .dialed = ""};
    CHECK_FALSE(silent.is_replaced_by(silent));
  }
}

TEST_SUITE("Peers") {
  TEST_CASE("the wait is sent to the node of the job, and returns its answer") {
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

  TEST_CASE("how far a node's jobs are is returned with its answer, also after a timeout") {
    Fixture f;
    const auto reached = [&] {
      return f.peers->await_job(kTheirNode, kJob, seconds(2)).wait(f.io.waitScope);
    };
    CHECK(reached().up_to == 0);  // As of a node that does not send it.
    f.theirs.up_to = 1000;
    CHECK(reached().ended);
    CHECK(reached().up_to == 1000);

    f.theirs.answer = fail(Errc::kTimeout, "no");
    f.theirs.up_to = 2;

    CHECK(reached().ended.error().code == Errc::kTimeout);
    CHECK(reached().up_to == 2);
  }

  TEST_CASE("a node whose answer to a wait is invalid is lost") {
    Fixture f;
    f.theirs.answer = fail(Errc::kInternal, "a bug");
    CHECK(f.wait().error().code == Errc::kInternal);
    CHECK(f.link().stats().losses == 1);
  }

  TEST_CASE("a wait lets the node answer in time, and is limited to the longest wait") {
    Fixture f(kPeerWireMaximum, milliseconds(100));
    REQUIRE(f.wait(seconds(2)));
    REQUIRE(f.wait(milliseconds(200)));
    REQUIRE(f.wait(milliseconds(0)));
    REQUIRE(f.wait(milliseconds(-5)));
    REQUIRE(f.wait(seconds(60)));
    CHECK(f.theirs.asked_ms == std::vector<std::uint32_t>{1900, 150, 0, 0, 9900});
  }

  TEST_CASE("a wait for a job of an unknown node or incarnation is not sent") {
    Fixture f;
    CHECK(f.wait(seconds(2), {5, 6}).error().code == Errc::kGone);
    CHECK(f.peers->waits().unknown == 1);
    CHECK(f.theirs.asked_ms.empty());
  }

  TEST_CASE("a wait is not sent to a node of an older version") {
    Fixture f(kPeerWireAwaitsJobs - 1);
    CHECK(f.wait().error().code == Errc::kRefused);
    CHECK(f.peers->waits().refused == 1);
    CHECK(f.theirs.asked_ms.empty());
  }

  TEST_CASE("a node that does not answer receives no further requests, and is lost after a time") {
    Fixture f(kPeerWireMaximum, milliseconds(10));
    f.theirs.answer.reset();
    CHECK(f.wait(milliseconds(20)).error().code == Errc::kTimeout);
    // Now it owes an answer.
    for (int i = 0; i < 5; ++i) CHECK(f.wait(milliseconds(20)).error().code == Errc::kBusy);
    CHECK(f.link().stats().late == 1);
    CHECK(f.link().stats().withheld == 5);
    CHECK(f.theirs.asked_ms.size() == 1);
    CHECK(f.peers->waits().timed_out == 1);
    CHECK(f.peers->waits().busy == 5);
    // The connection goes, and with it what it still had to answer; then it is dialed again.
    f.until([&]() { return !f.link().is_ready(); });
    CHECK(f.link().stats().losses == 1);
    CHECK(f.link().stats().why.find("no answer for") != std::string::npos);
    CHECK(f.wait().error().code == Errc::kGone);
    CHECK(f.peers->waits().unknown == 1);
  }

  TEST_CASE("deadlines that are missed at once do not lose a node that answers late") {
    Fixture f(kPeerWireMaximum, milliseconds(10), kSockets, seconds(60));
    f.theirs.answer.reset();
    kj::Vector<kj::Promise<JobsReached>> waits;
    for (int i = 0; i < 100; ++i) {
      waits.add(f.peers->await_job(kTheirNode, kJob, milliseconds(0)));
    }
    for (auto& wait : waits) CHECK(wait.wait(f.io.waitScope).ended.error().code == Errc::kTimeout);
    CHECK(f.link().stats().late == 100);
    CHECK(f.link().is_ready());
    CHECK(f.wait().error().code == Errc::kBusy);

    f.theirs.answer_owed();

    f.turn_until([&]() { return static_cast<bool>(f.wait()); });
    CHECK(f.link().stats().losses == 0);
    CHECK(f.link().life() == 1);
  }

  TEST_CASE("the lanes and leases of a silent node stay valid under its next greeting") {
    Fixture f(kPeerWireMaximum, milliseconds(10));
    const Lender::Route route = f.link().route();
    const std::uint64_t life = f.link().life();
    f.theirs.answer.reset();
    CHECK(f.wait(milliseconds(20)).error().code == Errc::kTimeout);
    f.until([&]() { return !f.link().is_ready(); });
    // A lease that ends meanwhile is released when the link is back.
    REQUIRE(f.link().can_release(life));
    f.link().release(4711);

    f.until([&]() { return f.link().is_ready(); });
    CHECK(f.link().life() == life + 1);
    CHECK(f.link().route() == route);
    REQUIRE(f.link().can_release(life));
    f.link().release(4712);
    f.turn_until([&]() { return f.theirs.released.size() == 2; });
    CHECK(f.theirs.released == std::vector<std::uint64_t>{4711, 4712});

    // What breaks there is known by the life in which it was leased, too.
    f.link().route_lost(life, route, "a test");
    f.until([&]() { return f.link().stats().losses == 2; });
    f.until([&]() { return f.link().is_ready(); });
    CHECK(f.link().route() != route);
  }

  TEST_CASE("a release whose answer was lost with the connection is sent again") {
    Fixture f;
    const std::uint64_t life = f.link().life();
    f.link().release(4711);
    f.turn_until([&]() { return f.theirs.released.size() == 1; });
    f.theirs.answers_releases = false;
    f.link().release(4712);
    f.turn_until([&]() { return f.theirs.released.size() == 2; });
    f.link().lost(life, "a test");
    f.theirs.answers_releases = true;
    f.turn_until([&]() { return f.theirs.released.size() == 3; });
    CHECK(f.theirs.released == std::vector<std::uint64_t>{4711, 4712, 4712});
  }

  TEST_CASE("leases of a former process are not released at its successor") {
    Fixture f(kPeerWireMaximum, milliseconds(10));
    const Lender::Route route = f.link().route();
    f.theirs.answer.reset();
    CHECK(f.wait(milliseconds(20)).error().code == Errc::kTimeout);
    f.until([&]() { return !f.link().is_ready(); });
    f.link().release(4711);
    f.theirs.node = {5, 6};

    f.until([&]() { return f.link().is_ready(); });
    CHECK(f.link().route() != route);
    CHECK_FALSE(f.link().can_release(1));
    f.theirs.answer_owed();
    CHECK(f.wait(seconds(2), {5, 6}));
    CHECK(f.theirs.released.empty());
  }

  TEST_CASE("a greeting names the link that it is for") {
    Fixture f;
    CHECK(f.theirs.dialed == std::vector<std::string>{f.link().address()});
  }

  TEST_CASE("a peer without epochs is not read from after a reset") {
    Fixture f(2);
    const Bytes32 space{std::byte{1}};
    const std::vector<BlockKey> keys(1);
    CHECK(f.link().locate(space, keys).wait(f.io.waitScope).value().blocks == 1);

    const Epoch epoch = f.epochs.raise(space).value();

    CHECK(f.link().locate(space, keys).wait(f.io.waitScope).value().blocks == 0);
    CHECK(f.link().lease(space, keys, 1, seconds(1)).wait(f.io.waitScope).value().pages.empty());
    CHECK(f.theirs.locates == 1);
    CHECK(f.link().reset(space, epoch, seconds(1)).wait(f.io.waitScope).error().code ==
          Errc::kRefused);
    CHECK(f.link().confirm(1, seconds(1)).wait(f.io.waitScope).value());
    CHECK(f.link().locate(Bytes32{std::byte{2}}, keys).wait(f.io.waitScope).value().blocks == 1);
  }

  TEST_CASE("a peer without the feature is not asked for each block") {
    Fixture f;
    const std::vector<BlockKey> keys(3);
    CHECK(f.link().locate_each(Bytes32{}, keys).wait(f.io.waitScope).error().code ==
          Errc::kRefused);
    CHECK(f.link().is_ready());
  }

  TEST_CASE("an answer for each block counts only if it is of this node's epoch") {
    const Bytes32 space{std::byte{1}};
    const std::vector<BlockKey> keys(3);
    Fixture f(kPeerWireMaximum, seconds(5), kSockets, PeerLink::Options().least_silence,
              kPeerLocatesEach);
    const std::vector<bool> middle = {false, true, false};
    CHECK(f.link().locate_each(space, keys).wait(f.io.waitScope).value().has == middle);
    const Epoch newer = f.theirs.epochs.raise(space).value();
    CHECK(f.link().locate_each(space, keys).wait(f.io.waitScope).value().has ==
          std::vector<bool>(3));
    CHECK(f.epochs.of(space) == newer);
    CHECK(f.link().locate_each(space, keys).wait(f.io.waitScope).value().has == middle);
  }

  TEST_CASE("a peer that reports more blocks than were asked for is given up") {
    Fixture f(kPeerWireMaximum, seconds(5), kSockets, PeerLink::Options().least_silence,
              kPeerLocatesEach);
    const std::vector<BlockKey> one(1);
    const auto answer = f.link().locate_each(Bytes32{}, one).wait(f.io.waitScope);
    REQUIRE_FALSE(answer);
    CHECK(answer.error().code == Errc::kInternal);
    CHECK_FALSE(f.link().is_ready());
  }

  TEST_CASE("a peer's newer epoch is learned from its answer, which is then discarded") {
    Fixture f;
    const Bytes32 space{std::byte{1}};
    const std::vector<BlockKey> keys(1);
    const Epoch newer = f.theirs.epochs.raise(space).value();

    CHECK(f.link().locate(space, keys).wait(f.io.waitScope).value().blocks == 0);
    CHECK(f.epochs.of(space) == newer);
    CHECK(f.link().locate(space, keys).wait(f.io.waitScope).value().blocks == 1);
  }

  TEST_CASE("a peer receives a reset that was made during its greeting") {
    Fixture f;
    const Bytes32 space{std::byte{1}};
    f.theirs.exchanging = [&]() {
      f.theirs.exchanging = nullptr;
      f.epochs.raise(space);
    };
    f.link().lost(f.link().life(), "a test");
    f.turn_until([&]() {
      return !f.epochs.of(space).is_zero() && f.theirs.epochs.of(space) == f.epochs.of(space);
    });
    CHECK(f.link().is_ready());
  }

  TEST_CASE("an address that leads to this node is dialed again, and may lead to another one") {
    Fixture f;
    f.theirs.node = f.own.node;
    f.link().lost(f.link().life(), "a test");
    f.until([&]() { return f.link().is_this_node(); });
    f.theirs.node = kTheirNode;
    f.until([&]() { return f.link().is_ready(); });
    CHECK_FALSE(f.link().is_this_node());
  }

  TEST_CASE("a node that claims to be this one has to prove the secret") {
    Fixture f;
    f.theirs.node = f.own.node;
    f.theirs.knows_secret = false;
    f.link().lost(f.link().life(), "a test");
    f.until([&]() { return f.link().stats().refusals != 0; });
    CHECK_FALSE(f.link().is_this_node());
  }

  TEST_CASE("a peer that is listed twice is dialed once") {
    server::ServerOptions options;
    options.peers = {"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:1"};
    options.nics = {"none"};
    const auto plan = server::Nodes::plan(options, "test");
    REQUIRE(plan);
    CHECK((*plan)->peers.addresses == std::vector<std::string>{"127.0.0.1:1", "127.0.0.1:2"});
  }

  TEST_CASE("the waits at one node are limited, and all end when it is lost") {
    Fixture f;
    f.theirs.answer.reset();
    kj::Vector<kj::Promise<JobsReached>> waits;
    for (std::size_t i = 0; i < PeerLink::kMaxWaits; ++i) {
      waits.add(f.peers->await_job(kTheirNode, kJob, seconds(10)));
    }
    CHECK(f.wait().error().code == Errc::kBusy);
    CHECK(f.peers->waits().waiting == PeerLink::kMaxWaits);

    // A caller that leaves meanwhile leaves nothing behind.
    waits.removeLast();
    CHECK(f.peers->waits().waiting == PeerLink::kMaxWaits - 1);
    f.peers->links()[0]->lost(f.peers->links()[0]->life(), "a test");

    for (auto& wait : waits) CHECK(wait.wait(f.io.waitScope).ended.error().code == Errc::kGone);
    CHECK(f.peers->waits().gone == PeerLink::kMaxWaits - 1);
    CHECK(f.peers->waits().waiting == 0);
  }

  TEST_CASE("RDMA is tried beside sockets, left when it breaks, and tried again, in one life") {
    if (!UcxFabric::load_library("")) PEGA_SKIP("built without UCX, or its library is missing");
    Fixture f(kPeerWireMaximum, seconds(5), kBoth);
    f.until([&]() { return f.link().stats().lane == "rdma"; });
    const Lender::Route first = f.link().route();
    const std::uint64_t life = f.link().life();

    f.link().route_lost(life, first, "a test");
    CHECK(f.link().is_ready());
    CHECK(f.link().stats().lane == "tcp");
    CHECK(f.link().stats().lane_why == "a test");
    // Other batches of it fail, too.
    f.link().route_lost(life, first, "again");
    CHECK(f.link().stats().lane_falls == 1);
    CHECK(f.link().is_ready());

    f.until([&]() { return f.link().stats().lane == "rdma"; });
    CHECK(f.link().route() != first);
    CHECK(f.link().stats().lane_why.empty());
    CHECK(f.link().life() == life);
    CHECK(f.link().stats().losses == 0);
  }

  TEST_CASE("with sockets only, a broken route ends that life") {
    Fixture f;
    const std::uint64_t life = f.link().life();

    f.link().route_lost(life, f.link().route(), "a test");

    f.until([&]() { return f.link().stats().losses == 1; });
    f.until([&]() { return f.link().is_ready(); });
    CHECK(f.link().life() == life + 1);
  }

  TEST_CASE("a link that is parked while it connects comes to rest, and can be dialed again") {
    Fixture f;
    const std::string address = f.link().address();
    PeerLink link(f.io, f.own, f.epochs, {.address = {}, .is_parked = true}, *f.lanes, []() {});
    auto running = link.run().eagerlyEvaluate(nullptr);
    f.turn_until([&]() { return link.is_resting(); });
    for (int i = 0; i < 3; ++i) {
      f.theirs.exchanging = [&]() { link.park(); };
      link.dial(address);
      f.turn_until([&]() { return link.is_resting(); });
      CHECK_FALSE(link.is_ready());
      // Parked before its first message, too.
      f.theirs.exchanging = nullptr;
      link.dial(address);
      link.park();
      f.turn_until([&]() { return link.is_resting(); });

      link.dial(address);
      f.turn_until([&]() { return link.is_ready(); });
      link.park();
      f.turn_until([&]() { return link.is_resting(); });
    }
  }
}

}  // namespace
}  // namespace pegaflow::cluster
