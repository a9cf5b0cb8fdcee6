// A node of peer version 2, which reads from a server of today: its messages have the length that
// they had then, without the fields and the requests of version 3.
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <capnp/any.h>
#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include "capnp/peer.capnp.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/peer_codec.h"
#include "cluster/peer_proof.h"
#include "tests/support/fabric_node.h"
#include "tests/support/nodes.h"
#include "transport/tcp/tcp_fabric.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = std::size_t{8} << 10;
constexpr std::size_t kPage = 2 * kPiece;
constexpr std::size_t kBlocks = 8;
const std::string kConnections = "pegaflow_peer_connections";

using AnyRequest = capnp::Request<capnp::AnyPointer, capnp::AnyPointer>;
using AnyAnswer = capnp::Response<capnp::AnyPointer>;

/// The dialer's side of peer.capnp as of version 2. Every call waits for its response.
class OldReader {
 public:
  OldReader(kj::AsyncIoContext& io, const std::string& address)
      : io_(io),
        stream_(io.provider->getNetwork()
                    .parseAddress(address.c_str())
                    .wait(io.waitScope)
                    ->connect()
                    .wait(io.waitScope)),
        client_(*stream_),
        gate_(client_.bootstrap()) {}

  /// Greets and enters. Returns the version that both speak.
  std::uint16_t enter() {
    cluster::PeerSecret::Greeting greeting{.dialer = {2, 2},
                                           .answerer = {},
                                           .dialer_challenge = cluster::random_bytes32(),
                                           .answerer_challenge = {}};
    auto greet = gate_.typelessRequest(capnp::typeId<wire::PeerGate>(), 0, nullptr);
    auto params = greet.initAsAnyStruct(1, 3);
    put<std::uint16_t>(params, 0, 1);
    put<std::uint16_t>(params, 2, 2);
    write_id(greeting.dialer, params.getPointerSection()[0].initAs<wire::Id128>());
    params.getPointerSection()[1].setAs<capnp::Text>("pegaflow-server 0.0.2");
    params.getPointerSection()[2].setAs<capnp::Data>(data_of(greeting.dialer_challenge));
    const AnyAnswer greeted = greet.send().wait(io_.waitScope);
    const auto answer = greeted.getAs<wire::PeerGate::GreetResults>();
    if (answer.getVersion() == 0) return 0;
    greeting.answerer = read_id(answer.getNode());
    greeting.answerer_challenge = read_bytes32(answer.getChallenge()).value();
    const auto proof = answer.getProof();
    CHECK(cluster::PeerSecret().is_proof(
        cluster::PeerSecret::Side::kAnswerer, greeting,
        std::as_bytes(std::span<const kj::byte>(proof.begin(), proof.size()))));

    auto enter = gate_.typelessRequest(capnp::typeId<wire::PeerGate>(), 1, nullptr);
    auto said = enter.initAsAnyStruct(0, 1);
    said.getPointerSection()[0].setAs<capnp::Data>(
        data_of(cluster::PeerSecret().prove(cluster::PeerSecret::Side::kDialer, greeting)));
    AnyAnswer entered = enter.send().wait(io_.waitScope);
    const auto let_in = entered.getAs<wire::PeerGate::EnterResults>();
    REQUIRE(let_in.hasPeer());
    fabric_ = read_fabric(let_in.getFabric()).value();
    peer_ = let_in.getPeer();
    return answer.getVersion();
  }

  std::size_t locate(const Bytes32& space, const std::vector<BlockKey>& keys) {
    AnyRequest request = ask(0);
    auto params = request.initAsAnyStruct(0, 2);
    name(params, space, keys);
    return request.send().wait(io_.waitScope).getAs<wire::Peer::LocateResults>().getSealed();
  }
  LeaseGrant lease(const Bytes32& space, const std::vector<BlockKey>& keys) {
    AnyRequest request = ask(1);
    auto params = request.initAsAnyStruct(1, 2);
    name(params, space, keys);
    put<std::uint32_t>(params, 0, 10000);
    const AnyAnswer answer = request.send().wait(io_.waitScope);
    return read_grant(answer.getAs<wire::Peer::LeaseResults>(), keys.size(), 1).value();
  }
  Result<void> release(std::uint64_t lease) {
    AnyRequest request = ask(2);
    put(request.initAsAnyStruct(1, 0), 0, lease);
    return read_done(request.send().wait(io_.waitScope).getAs<wire::Done>());
  }
  Result<void> await_job(const JobId& job) {
    AnyRequest request = ask(3);
    auto params = request.initAsAnyStruct(1, 1);
    put<std::uint32_t>(params, 0, 1000);
    write_job(job, params.getPointerSection()[0].initAs<wire::JobId>());
    return read_done(request.send().wait(io_.waitScope).getAs<wire::Done>());
  }

  [[nodiscard]] const FabricDescriptor& fabric() const { return fabric_; }

 private:
  static capnp::Data::Reader data_of(const Bytes32& bytes) {
    return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
  }
  template <typename T>
  static void put(capnp::AnyStruct::Builder params, std::size_t at, T value) {
    std::memcpy(params.getDataSection().begin() + at, &value, sizeof value);
  }
  static void name(capnp::AnyStruct::Builder params, const Bytes32& space,
                   const std::vector<BlockKey>& keys) {
    params.getPointerSection()[0].setAs<capnp::Data>(data_of(space));
    write_keys(keys, BlockKey::kMaxBytes, params.getPointerSection()[1].initAs<wire::Keys>());
  }
  AnyRequest ask(std::uint16_t method) {
    return peer_->typelessRequest(capnp::typeId<wire::Peer>(), method, nullptr);
  }

  kj::AsyncIoContext& io_;
  kj::Own<kj::AsyncIoStream> stream_;
  capnp::TwoPartyClient client_;
  capnp::Capability::Client gate_;
  std::optional<capnp::Capability::Client> peer_;
  FabricDescriptor fabric_;
};

constexpr Id128 kScheduler{7, 7};

/// An engine at `server`, and its memory.
struct Engine {
  Engine(const ServerProcess& server, const std::string& model)
      : memory(engine_memory(2, kPiece, kBlocks)) {
    TestEngine::Options options;
    options.socket = server.socket();
    options.instance = options.model = model;
    if (model == "model") options.session.scheduler = kScheduler;
    engine = std::make_unique<TestEngine>(std::move(options), memory, *device);
    engine->scheduler = kScheduler;
    engine->wait_ready();
  }
  void save(std::size_t blocks) const {
    REQUIRE_FALSE(engine->save(numbers_from(1, blocks), blocks_from(0, blocks)).error);
  }
  TestEngine* operator->() const { return engine.get(); }

  EngineMemory memory;
  std::unique_ptr<HostDevice> device = HostDevice::create({}).value();
  std::unique_ptr<TestEngine> engine;
};

/// The namespace of an engine, by its name among nodes.
Bytes32 space_of(const std::string& model) {
  return cluster::space_name(std::vector<engine::NamespaceFactor>{{"model", model}},
                             std::vector<std::uint64_t>{kPage});
}

/// A server of today with an engine that has saved blocks.
struct Owner {
  Owner() { engine.save(kBlocks); }

  std::vector<std::string> at = node_addresses(1);
  ServerProcess server{node_options(at[0], {})};
  Engine engine{server, "model"};
  const Bytes32 space = space_of("model");
  const std::vector<BlockKey> keys = numbered_keys(numbers_from(1, kBlocks));
  kj::AsyncIoContext io = kj::setupAsyncIo();
};

TEST_SUITE("a node of peer version 2") {
  TEST_CASE("it sees the blocks of the pool, and none that are only on a disk") {
    TemporaryDirectory directory;
    const std::string file = (directory.path() / "cache").string();
    const std::vector<std::string> at = node_addresses(1);
    const std::vector<std::string> disk = {
        "--ssd-cache-path",   file,  "--ssd-cache-capacity", "32mb",
        "--ssd-segment-size", "1mb", "--ssd-write-ahead",    "1mb"};
    const ServerProcess server(node_options(at[0], {}, disk, "1mb"));
    REQUIRE(disk_is_ready(server, file));
    Engine engine(server, "model");
    engine.save(kBlocks);
    REQUIRE(
        server.metric_becomes("pegaflow_ssd_written_blocks_total{disk=\"" + file + "\"}", kBlocks));
    kj::AsyncIoContext io = kj::setupAsyncIo();
    OldReader reader(io, at[0]);
    REQUIRE(reader.enter() == 2);
    const std::vector<BlockKey> keys = numbered_keys(numbers_from(1, kBlocks));
    CHECK(reader.locate(space_of("model"), keys) == kBlocks);

    REQUIRE(server.post("/cache/memory/cleanup").status == 200);
    REQUIRE(server.metric_becomes("pegaflow_cache_resident_blocks", 0));

    REQUIRE(engine->lookup(numbers_from(1, kBlocks)).value().blocks == kBlocks);
    CHECK(reader.locate(space_of("model"), keys) == 0);
    const LeaseGrant grant = reader.lease(space_of("model"), keys);
    CHECK(grant.pages.empty());
    CHECK(grant.staging == 0);
    CHECK(server.metric("pegaflow_ssd_staged_blocks_total") == 0);
  }

  TEST_CASE("it is admitted, finds and reads blocks, and waits for saves") {
    Owner owner;
    OldReader reader(owner.io, owner.at[0]);
    REQUIRE(reader.enter() == 2);
    CHECK(reader.locate(owner.space, owner.keys) == kBlocks);
    const LeaseGrant grant = reader.lease(owner.space, owner.keys);
    REQUIRE(grant.pages.size() == kBlocks);
    CHECK(grant.lease != 0);
    CHECK(grant.granted == std::chrono::seconds(10));

    const SteadyClock clock;
    FabricNode memory(
        [&clock](Fabric::CompletionSink sink) {
          return TcpFabric::create({.connect_timeout = kHang, .stall_timeout = kHang}, clock,
                                   std::move(sink))
              .value();
        },
        kBlocks * kPage, 1);
    const Fabric::PeerId peer = memory.fabric->connect(reader.fabric()).value();
    std::vector<Fabric::Chunk> chunks;
    for (std::size_t i = 0; i < kBlocks; ++i) {
      chunks.push_back({.remote_region = reader.fabric().regions.front().region,
                        .remote_offset = grant.pages[i] * std::uint64_t{kSlotAlignment},
                        .local_region = memory.region,
                        .local_offset = i * kPage,
                        .size_bytes = kPage});
    }
    const Fabric::Completion done = memory.read(peer, chunks);
    std::vector<std::byte> expected(kPage);
    for (std::size_t i = 0; i < kBlocks; ++i) {
      CHECK_FALSE(done.chunks[i].has_value());
      fill_page(expected.data(), kPage, TestEngine::seed_of(1 + i, 0));
      CHECK(std::memcmp(memory.memory.data() + i * kPage, expected.data(), kPage) == 0);
    }

    CHECK(owner.server.metric("pegaflow_leases") == 1);
    CHECK(reader.release(grant.lease));
    CHECK(owner.server.metric_becomes("pegaflow_leases", 0));
    CHECK(reader.await_job({kScheduler, owner.engine->last_job}));
  }

  TEST_CASE("after a reset it gets no block of that namespace, and everything else continues") {
    Owner owner;
    OldReader reader(owner.io, owner.at[0]);
    REQUIRE(reader.enter() == 2);
    REQUIRE(reader.locate(owner.space, owner.keys) == kBlocks);

    REQUIRE(owner.engine->session().reset_cache(kHang));
    CHECK(reader.locate(owner.space, owner.keys) == 0);
    // Nor any block saved after the reset: the old node may have missed any reset.
    owner.engine.save(kBlocks);
    REQUIRE(owner.engine->lookup(numbers_from(1, kBlocks)).value().blocks == kBlocks);
    CHECK(reader.locate(owner.space, owner.keys) == 0);
    CHECK(reader.lease(owner.space, owner.keys).pages.empty());
    CHECK(reader.await_job({kScheduler, owner.engine->last_job}));

    const Engine other(owner.server, "other");
    other.save(2);
    CHECK(reader.locate(space_of("other"), owner.keys) == 2);
    CHECK(reader.lease(space_of("other"), owner.keys).pages.size() == 2);
  }

  TEST_CASE("its connections are not replaced by a newer greeting: it does not name its link") {
    Owner owner;
    OldReader one(owner.io, owner.at[0]);
    REQUIRE(one.enter() == 2);
    OldReader other(owner.io, owner.at[0]);
    REQUIRE(other.enter() == 2);

    CHECK(owner.server.metric(kConnections) == 2);
    CHECK(owner.server.metric("pegaflow_peer_connections_replaced_total") == 0);
    CHECK(one.locate(owner.space, owner.keys) == kBlocks);
    CHECK(other.locate(owner.space, owner.keys) == kBlocks);
  }
}

}  // namespace
}  // namespace pegaflow::testing
