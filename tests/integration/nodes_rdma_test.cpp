// Nodes that read from each other over the RDMA lane: real servers, over UCX.
//
// No server is killed here: UCX over TCP may end the surviving one. tests/rxe kills servers.
#include <csignal>
#include <string>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/support/rdma_nodes.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = std::size_t{64} << 10;
constexpr double kPage = 2 * kPiece;
constexpr std::size_t kBlocks = 40;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

nlohmann::json nodes_of(const ServerProcess& server) {
  return nlohmann::json::parse(server.get("/health").body).at("nodes");
}

/// Saves at `a` and loads at `b`: every byte is right and came over `lane`.
void check_read(const ServerProcess& a, const ServerProcess& b, const std::string& lane,
                std::uint64_t first = 1) {
  const std::string bytes = fmt::format("pegaflow_fetch_lane_bytes_total{{lane=\"{}\"}}", lane);
  const double before = b.metric(bytes);
  EngineAt on_a(a, kPiece, kBlocks);
  EngineAt on_b(b, kPiece, kBlocks);
  REQUIRE(on_a.engine->save(numbers_from(first, kBlocks), blocks_from(0, kBlocks)).blocks ==
          kBlocks);

  const auto claimed = on_b.engine->claim(numbers_from(first, kBlocks)).value();
  CHECK(claimed.blocks == kBlocks);
  const Mover::Finished loaded = on_b.engine->load(claimed.token, blocks_from(0, kBlocks));

  CHECK(loaded.blocks == kBlocks);
  CHECK(on_b.engine->wrong_blocks(numbers_from(first, kBlocks), blocks_from(0, kBlocks)) == 0);
  CHECK(b.metric(bytes) - before == kBlocks * kPage);
  CHECK(b.metric_becomes("pegaflow_fetch_batches", 0));
  CHECK(a.metric_becomes("pegaflow_leases", 0));
}

TEST_SUITE("nodes over RDMA") {
  TEST_CASE("two nodes with cards negotiate RDMA and read over it") {
    const auto at = node_addresses(2);
    const ServerProcess a(rdma_node(0, at));
    const ServerProcess b(rdma_node(1, at));
    REQUIRE(reads_over(b, at[0], "rdma"));
    REQUIRE(reads_over(a, at[1], "rdma"));

    check_read(a, b, "rdma", 1);
    check_read(b, a, "rdma", 5001);

    CHECK(nodes_of(b).at("lane") == "rdma");
    CHECK(nodes_of(b).at("cards").size() == 1);
    CHECK(has(nodes_of(b).at("ucx").at("version"), "1."));
    CHECK(has(nodes_of(b).at("ucx").at("library"), "libucp"));
    CHECK(nodes_of(b).at("peers").at(0).at("lane") == "rdma");
    CHECK(b.metric("pegaflow_lane_info{lane=\"rdma\"}") == 1);
    CHECK(b.metric("pegaflow_lane_info{lane=\"tcp\"}") == 1);
    CHECK(has(b.log(), "pool registered with RDMA cards="));
    CHECK(has(b.log(), "peer is read over a better lane"));
  }

  TEST_CASE("a node with cards and one without share their cache over sockets") {
    const auto at = node_addresses(2);
    const ServerProcess with(rdma_node(0, at));
    const ServerProcess without(node_options(at[1], at));
    REQUIRE(reads_over(with, at[1], "tcp"));
    REQUIRE(reads_over(without, at[0], "tcp"));

    check_read(with, without, "tcp", 1);
    check_read(without, with, "tcp", 5001);

    CHECK(with.metric(lane_sample(at[1], "rdma")) == 0);
  }

  TEST_CASE("a UCX library that is not there leaves sockets, and log and /health name it") {
    const auto at = node_addresses(2);
    const std::string missing = "/nonexistent/libucp.so.0";
    const ServerProcess with(rdma_node(0, at));
    const ServerProcess without(rdma_node(1, at, {"--ucx-library", missing}));
    REQUIRE(reads_over(with, at[1], "tcp"));
    REQUIRE(reads_over(without, at[0], "tcp"));

    check_read(with, without, "tcp", 1);

    CHECK(nodes_of(without).at("lane") == "tcp");
    CHECK_FALSE(nodes_of(without).contains("ucx"));
    CHECK(has(nodes_of(without).at("no_rdma"), missing));
    CHECK(has(nodes_of(without).at("no_rdma"), "PEGA_UCX_LIBRARY"));
    CHECK(has(without.log(), "the library of --ucx-library cannot be used"));
    CHECK(has(without.log(), "no_rdma=\"UCX: " + missing));
  }

  TEST_CASE(
      "--require-rdma: no byte comes over sockets, and a peer with sockets only is rejected") {
    const auto at = node_addresses(3);
    const ServerProcess a(rdma_node(0, at, {"--require-rdma"}));
    const ServerProcess b(rdma_node(1, at, {"--require-rdma"}));
    const ServerProcess plain(node_options(at[2], {at[0]}));
    REQUIRE(reads_over(b, at[0], "rdma"));

    check_read(a, b, "rdma");

    const std::string refusals = "pegaflow_peer_refusals_total{peer=\"" + at[0] + "\"}";
    CHECK(plain.metric_becomes(refusals, 1));
    CHECK(has(plain.log(), "no lane in common: this node has only tcp, the peer has ucx"));
    CHECK(nodes_of(a).at("peers").at(1).at("state") == "ready");
    CHECK_THROWS((void)b.metric("pegaflow_lane_info{lane=\"tcp\"}"));
  }

  TEST_CASE("an abandoned read's memory is not reused before the card has stopped writing to it") {
    const auto at = node_addresses(2);
    ServerProcess a(rdma_node(0, at, {}, "256mb"));
    const ServerProcess b(
        rdma_node(1, at, {"--peer-deadline", "100ms", "--fetch-deadline", "300ms"}, "256mb"));
    constexpr std::size_t kMany = 384;  // 48 MiB: their reads take longer than a claim.
    EngineAt on_b(b, kPiece, kMany);
    const std::string unquiesced = "pegaflow_fetch_troubles_total{reason=\"unsettled\"}";
    EngineAt on_a(a, kPiece, kMany);
    for (std::uint64_t first = 1; b.metric(unquiesced) == 0; first += 1000) {
      REQUIRE(first < 20000);
      REQUIRE(reads_over(b, at[0], "rdma"));
      on_a.engine->save(numbers_from(first, kMany), blocks_from(0, kMany));

      // The reads need A's processor here, and A is stopped: they are late and not quiesced.
      const auto claimed = on_b.engine->claim(numbers_from(first, kMany)).value();
      a.signal(SIGSTOP);
      on_b.load_and_check(claimed, first);
      a.signal(SIGCONT);
    }
    check_nothing_is_left(b, 1);
  }
}

}  // namespace
}  // namespace pegaflow::testing
