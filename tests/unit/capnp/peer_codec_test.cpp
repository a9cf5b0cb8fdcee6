#include "capnp/wire/peer_codec.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <capnp/message.h>
#include <doctest/doctest.h>

#include "capnp/wire/codec.h"
#include "capnp/wire/peer_direct.h"

namespace pegaflow::testing {
namespace {

/// A message of its own, and a root in it.
template <typename T>
struct Made {
  capnp::MallocMessageBuilder message;
  typename T::Builder root = message.initRoot<T>();
};

FabricDescriptor lane_with(std::string backend, std::vector<RegionDescriptor> regions) {
  FabricDescriptor lane;
  lane.backend = std::move(backend);
  lane.regions = std::move(regions);
  return lane;
}

TEST_SUITE("peer codec") {
  TEST_CASE(
      "a question for blocks in the memory of workers is read back, with a limit of its wait") {
    const PeerQuestion question{.reader = {.group = "pd", .shard = 3},
                                .read = 77,
                                .patience = std::chrono::milliseconds(250),
                                .known = {5, 6},
                                .pool_only = true};
    Made<wire::Peer::OpenNextParams> made;
    write_question(question, made.root);
    const PeerQuestion read = read_question(made.root).value();
    CHECK(read.reader.group == "pd");
    CHECK(read.reader.shard == 3);
    CHECK(read.read == 77);
    CHECK(read.patience == std::chrono::milliseconds(250));
    CHECK(read.known == std::vector<std::uint64_t>{5, 6});
    CHECK(read.pool_only);
    made.root.setMilliseconds(3'600'000);
    CHECK(read_question(made.root).value().patience == kLongestPeerOpen);
    made.root.getReader().setGroup("");
    CHECK(read_question(made.root).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE(
      "a piece of another node's memory is read back unless its counts contradict each other") {
    PeerPiece piece{.blocks = {7, 8, 9}, .guards = {{1, 11, 2}, {2, 12, 1}}, .source = 4};
    const auto read_back = [&](std::size_t asked) {
      Made<wire::Peer::OpenNextResults> made;
      write_piece(piece, made.root);
      return read_piece(made.root, asked);
    };
    const PeerPiece read = read_back(3).value();
    CHECK(read.blocks == piece.blocks);
    CHECK(read.guards[1].place == 2);
    CHECK(read.guards[1].value == 12);
    CHECK(read.guards[1].blocks == 1);
    CHECK(read.source == 4);
    CHECK_FALSE(read.memory);
    const auto contradicts = [&](std::size_t asked) {
      return read_back(asked).error().code == Errc::kInternal;
    };
    CHECK(contradicts(2));  // More blocks than keys.
    piece.guards[1].blocks = 2;
    CHECK(contradicts(3));
    piece.guards[1].blocks = 1;
    piece.guards[0].value = 0;  // Closed.
    CHECK(contradicts(3));
    piece.guards = {{1, 11, 3}, {2, 12, 0}};
    CHECK(contradicts(3));
    piece.guards = {{1, 11, 2}, {2, 12, 1}};
    piece.source = 0;
    CHECK(contradicts(3));
    piece = {.sealed = 4};
    CHECK(contradicts(3));
    CHECK(read_back(4).value().sealed == 4);
    // Memory of this host, which a reader of another one cannot use.
    piece = {.blocks = {1},
             .guards = {{1, 11, 1}},
             .source = 4,
             .memory = OfferedMemory{
                 .group = "pd", .blocks = 8, .segments = {{.stride = 8, .bytes = 8}}, .guards = 1}};
    CHECK(contradicts(1));
  }

  TEST_CASE("a fabric is read back unchanged") {
    const FabricDescriptor fabric{
        .backend = "tcp",
        .incarnation = Id128::random(),
        .address = {std::byte{1}, std::byte{0}, std::byte{255}},
        .regions = {{.region = RegionId{7}, .size_bytes = 1U << 20, .key = {std::byte{9}}},
                    {.region = RegionId{8}, .size_bytes = 5}}};
    Made<wire::Fabric> made;
    write_fabric(fabric, made.root);

    const auto read = read_fabric(made.root.asReader()).value();

    CHECK(read.backend == fabric.backend);
    CHECK(read.incarnation == fabric.incarnation);
    CHECK(read.address == fabric.address);
    REQUIRE(read.regions.size() == 2);
    CHECK(read.regions[0].region == RegionId{7});
    CHECK(read.regions[0].size_bytes == 1U << 20);
    CHECK(read.regions[0].key == fabric.regions[0].key);
    CHECK(read.regions[1].key.empty());
  }

  TEST_CASE("a fabric beyond the limits is refused") {
    const auto code = [](auto&& change) {
      Made<wire::Fabric> made;
      change(made.root);
      const auto read = read_fabric(made.root.asReader());
      REQUIRE_FALSE(read);
      return read.error().code;
    };
    CHECK(code([](auto& root) { root.initRegions(513); }) == Errc::kInvalidArgument);
    CHECK(code([](auto& root) { root.initAddress(65537); }) == Errc::kInvalidArgument);
    CHECK(code([](auto& root) { root.initBackend(65); }) == Errc::kInvalidArgument);
    CHECK(code([](auto& root) { root.initRegions(1)[0].initKey(65537); }) ==
          Errc::kInvalidArgument);
  }

  TEST_CASE("all lanes of a node are read back, the first where older nodes expect it") {
    const FabricDescriptor tcp = lane_with("tcp", {{.region = RegionId{1}}});
    const FabricDescriptor ucx = lane_with("ucx", {{.region = RegionId{2}}});
    Made<wire::PeerGate::EnterResults> made;
    write_fabrics(std::vector{tcp, ucx}, made.root);

    const auto read = read_fabrics(made.root.asReader()).value();

    REQUIRE(read.size() == 2);
    CHECK(read[0].backend == "tcp");
    CHECK(read[1].backend == "ucx");
    CHECK(std::string_view(made.root.getFabric().getBackend().cStr()) == "tcp");
    // A node of an older version names no others.
    Made<wire::PeerGate::EnterResults> older;
    write_fabric(tcp, older.root.initFabric());
    CHECK(read_fabrics(older.root.asReader()).value().size() == 1);
  }

  TEST_CASE("lanes without a pool, or too many of them, are refused") {
    const FabricDescriptor good = lane_with("tcp", {{.region = RegionId{1}}});
    const FabricDescriptor empty = lane_with("ucx", {});
    Made<wire::PeerGate::EnterResults> without_pool;
    write_fabrics(std::vector{good, empty}, without_pool.root);
    CHECK(read_fabrics(without_pool.root.asReader()).error().code == Errc::kInvalidArgument);
    Made<wire::PeerGate::EnterResults> many;
    write_fabrics(std::vector<FabricDescriptor>(9, good), many.root);
    CHECK(read_fabrics(many.root.asReader()).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("an epoch is read back, and one more than a day ahead of the clock is refused") {
    using std::chrono::hours;
    using std::chrono::microseconds;
    const auto epoch_at = [](hours ahead) {
      const auto at = std::chrono::system_clock::now().time_since_epoch() + ahead;
      const auto counter = std::chrono::duration_cast<microseconds>(at).count();
      return Epoch{.counter = static_cast<std::uint64_t>(counter), .id = 7};
    };
    const auto passed_on = [](const Epoch& epoch) {
      capnp::MallocMessageBuilder message;
      const auto builder = message.initRoot<wire::Epoch>();
      write_epoch(epoch, builder);
      return read_epoch(builder.asReader());
    };
    for (const Epoch& fine : {Epoch{}, Epoch{.counter = 1, .id = 2}, epoch_at(hours(-1)),
                              epoch_at(kMostEpochAhead - hours(1))}) {
      CHECK(passed_on(fine).value() == fine);
    }
    for (const Epoch& wrong : {epoch_at(kMostEpochAhead + hours(1)),
                               Epoch{.counter = Epoch::kEnd - 1}, Epoch{.counter = Epoch::kEnd}}) {
      CHECK(passed_on(wrong).error().code == Errc::kInvalidArgument);
    }
  }

  TEST_CASE("which blocks are present is read back, and more bits than keys are invalid") {
    const auto read = [](std::vector<std::byte> packed, std::size_t keys) {
      return read_present({reinterpret_cast<const kj::byte*>(packed.data()), packed.size()}, keys);
    };
    std::vector<bool> present(19);
    present[0] = present[8] = present[18] = true;
    CHECK(read(pack_present(present), 19).value() == present);
    CHECK(read({}, 3).value() == std::vector<bool>(3));
    CHECK(read({std::byte{1}}, 19).value()[0]);
    CHECK(read({std::byte{0b1000}}, 3).error().code == Errc::kInternal);
    CHECK(read({std::byte{0}, std::byte{0}}, 8).error().code == Errc::kInternal);
  }

  TEST_CASE("only 32 bytes are read as 32 bytes") {
    const std::array<kj::byte, 33> bytes{3};
    CHECK(read_bytes32({bytes.data(), 32}).value()[0] == std::byte{3});
    CHECK(read_bytes32({bytes.data(), 31}).error().code == Errc::kInvalidArgument);
    CHECK(read_bytes32({bytes.data(), 33}).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a grant is read back, and one that does not match its request is invalid") {
    using Results = wire::Peer::LeaseResults;
    const LeaseGrant grant{.lease = 5,
                           .granted = std::chrono::milliseconds(10000),
                           .pages = {1, 2, 3, 4},
                           .checksums = {10, 0, 30, 40}};
    Made<Results> made;
    write_grant(grant, made.root);
    const auto read = read_grant(made.root.asReader(), 2, 2).value();
    CHECK(read.lease == 5);
    CHECK(read.granted == grant.granted);
    CHECK(read.pages == grant.pages);
    CHECK(read.checksums == grant.checksums);
    CHECK(read_grant(made.root.asReader(), 1, 2).error().code == Errc::kInternal);  // Too many.
    CHECK(read_grant(made.root.asReader(), 4, 3).error().code == Errc::kInternal);  // Half a block.
    made.root.setLease(0);
    CHECK(read_grant(made.root.asReader(), 2, 2).error().code == Errc::kInternal);
    made.root.setLease(5);
    made.root.initChecksums(3);
    CHECK(read_grant(made.root.asReader(), 2, 2).error().code == Errc::kInternal);

    Made<Results> nothing;
    write_grant({}, nothing.root);
    CHECK(read_grant(nothing.root.asReader(), 2, 2).value().pages.empty());
    write_error({Errc::kBusy, "too much is lent"}, nothing.root.initError());
    CHECK(read_grant(nothing.root.asReader(), 2, 2).error().code == Errc::kBusy);
  }

  TEST_CASE("blocks that are pending are read back, and more than were asked for are invalid") {
    using Results = wire::Peer::LeaseResults;
    LeaseGrant grant{.lease = 5, .granted = std::chrono::milliseconds(10000), .pages = {1, 2}};
    grant.pending = {.blocks = 3, .bytes_per_second = 7, .queued_bytes = 8};
    grant.staging = 9;
    Made<Results> made;
    write_grant(grant, made.root);
    const auto read = read_grant(made.root.asReader(), 4, 2).value();
    CHECK(read.pending.blocks == 3);
    CHECK(read.pending.bytes_per_second == 7);
    CHECK(read.pending.queued_bytes == 8);
    CHECK(read.staging == 9);
    CHECK(read_grant(made.root.asReader(), 3, 2).error().code == Errc::kInternal);
    // Pending blocks without a number to request them with, and a number without blocks.
    made.root.setStaging(0);
    CHECK(read_grant(made.root.asReader(), 4, 2).error().code == Errc::kInternal);
    made.root.setStaging(9);
    made.root.getPending().setBlocks(0);
    CHECK(read_grant(made.root.asReader(), 4, 2).error().code == Errc::kInternal);

    Made<Results> nothing;
    write_grant({}, nothing.root);
    CHECK_FALSE(nothing.root.asReader().hasPending());
  }
}

}  // namespace
}  // namespace pegaflow::testing
