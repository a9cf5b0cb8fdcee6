// A prefix that one node computed is read by other nodes: real servers, without faults.
#include "tests/support/nodes.h"

#include <string>
#include <utility>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = std::size_t{8} << 10;
constexpr double kPage = 2 * kPiece;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Two nodes whose peer lists name both of them.
struct TwoNodes {
  std::vector<std::string> at = node_addresses(2);
  ServerProcess a{node_options(at[0], at)};
  ServerProcess b{node_options(at[1], at)};
};

TEST_SUITE("nodes") {
  TEST_CASE("a block of one node is found, read and sealed by the other, byte for byte") {
    const TwoNodes two;
    const auto& [at, a, b] = two;
    EngineAt on_a(a, kPiece, 64);
    EngineAt on_b(b, kPiece, 64);
    REQUIRE(sees(b, at[0]));
    REQUIRE_FALSE(on_a.engine->save(numbers_from(100, 40), blocks_from(0, 40)).error);

    // A lookup finds it without a claim or a transfer.
    const auto found = on_b.engine->lookup(numbers_from(100, 50)).value();
    CHECK(found.blocks == 40);
    CHECK(found.coming == 40);
    CHECK(b.metric("pegaflow_fetch_bytes_total") == 0);

    const auto claimed = on_b.engine->claim(numbers_from(100, 50)).value();
    CHECK(claimed.blocks == 40);
    CHECK(claimed.coming == 40);
    const Mover::Finished loaded = on_b.engine->load(claimed.token, blocks_from(10, 40));

    CHECK_FALSE(loaded.error);
    CHECK(loaded.blocks == 40);
    CHECK(loaded.bytes == 40 * kPage);
    CHECK(on_b.engine->wrong_blocks(numbers_from(100, 40), blocks_from(10, 40)) == 0);
    CHECK(b.metric("pegaflow_fetch_blocks_total{result=\"whole\"}") == 40);
    CHECK(b.metric("pegaflow_fetch_blocks_total{result=\"given_up\"}") == 0);
    CHECK(b.metric("pegaflow_fetch_bytes_total") == 40 * kPage);
    CHECK(b.metric("pegaflow_replica_blocks") == 40);
    CHECK(a.metric("pegaflow_lent_bytes_total") == 40 * kPage);
    // The lease was returned and did not expire; no state of it is left.
    CHECK(a.metric_becomes("pegaflow_leases", 0));
    CHECK(a.metric("pegaflow_leases_total{result=\"ran_out\"}") == 0);
    CHECK(b.metric_becomes("pegaflow_fetch_batches", 0));

    // From now on B has its own copy.
    on_b.engine->session().unclaim(claimed.token);
    const auto again = on_b.engine->lookup(numbers_from(100, 40)).value();
    CHECK(again.blocks == 40);
    CHECK(again.coming == 0);
    CHECK(b.metric("pegaflow_fetch_bytes_total") == 40 * kPage);
  }

  TEST_CASE("a local prefix and its remote rest are one claim") {
    const TwoNodes two;
    const auto& [at, a, b] = two;
    EngineAt on_a(a, kPiece, 64);
    EngineAt on_b(b, kPiece, 64);
    REQUIRE(sees(b, at[0]));
    on_a.engine->save(numbers_from(1, 30), blocks_from(0, 30));
    on_b.engine->save(numbers_from(1, 10), blocks_from(0, 10));

    const auto claimed = on_b.engine->claim(numbers_from(1, 30)).value();
    CHECK(claimed.blocks == 30);
    CHECK(claimed.coming == 20);
    const Mover::Finished loaded = on_b.engine->load(claimed.token, blocks_from(20, 30));

    CHECK_FALSE(loaded.error);
    CHECK(on_b.engine->wrong_blocks(numbers_from(1, 30), blocks_from(20, 30)) == 0);
    CHECK(b.metric("pegaflow_fetch_blocks_total{result=\"whole\"}") == 20);
  }

  TEST_CASE("many claims on one prefix fetch it once") {
    const TwoNodes two;
    const auto& [at, a, b] = two;
    EngineAt on_a(a, kPiece, 64);
    EngineAt on_b(b, kPiece, 64);
    REQUIRE(sees(b, at[0]));
    on_a.engine->save(numbers_from(1, 40), blocks_from(0, 40));

    std::vector<CacheSession::Ticket> asked;
    for (int i = 0; i < 8; ++i) {
      asked.push_back(on_b.engine->session().claim(numbered_keys(numbers_from(1, 40))).value());
    }
    for (const CacheSession::Ticket ticket : asked) {
      const auto claimed = on_b.engine->session().take(ticket, kHang).value().value();
      CHECK(claimed.blocks == 40);
      const Mover::Finished loaded = on_b.engine->load(claimed.token, blocks_from(0, 40));
      CHECK_FALSE(loaded.error);
      CHECK(on_b.engine->wrong_blocks(numbers_from(1, 40), blocks_from(0, 40)) == 0);
    }

    CHECK(b.metric("pegaflow_fetch_blocks_total{result=\"whole\"}") == 40);
  }

  TEST_CASE("both nodes greet each other, and every node can use the same peer list") {
    const TwoNodes two;
    const auto& [at, a, b] = two;
    EngineAt on_a(a, kPiece, 16);
    EngineAt on_b(b, kPiece, 16);
    REQUIRE(sees(a, at[1]));
    REQUIRE(sees(b, at[0]));

    on_a.engine->save(numbers_from(1, 8), blocks_from(0, 8));
    on_b.engine->save(numbers_from(51, 8), blocks_from(0, 8));
    const auto at_a = on_a.engine->claim(numbers_from(51, 8)).value();
    const auto at_b = on_b.engine->claim(numbers_from(1, 8)).value();
    CHECK(on_a.engine->load(at_a.token, blocks_from(8, 8)).blocks == 8);
    CHECK(on_b.engine->load(at_b.token, blocks_from(8, 8)).blocks == 8);

    CHECK(on_a.engine->wrong_blocks(numbers_from(51, 8), blocks_from(8, 8)) == 0);
    CHECK(on_b.engine->wrong_blocks(numbers_from(1, 8), blocks_from(8, 8)) == 0);
    const auto health = nlohmann::json::parse(a.get("/health").body);
    CHECK(health.at("nodes").at("lane") == "tcp");
    CHECK(health.at("nodes").at("no_rdma") == "--nics none");
    CHECK(health.at("nodes").at("peers").at(1).at("lane") == "tcp");
    CHECK(health.at("nodes").at("listen") == at[0]);
    CHECK(health.at("nodes").at("peers").at(0).at("state") == "self");
    CHECK(health.at("nodes").at("peers").at(1).at("state") == "ready");
  }

  TEST_CASE("a node whose engines change their page size lends no page of another size") {
    const TwoNodes two;
    const auto& [at, a, b] = two;
    EngineAt on_a(a, 2 * kPiece, 16);
    REQUIRE(sees(b, at[0]));
    REQUIRE(sees(a, at[1]));
    { const EngineAt leaves_nothing(b, 2 * kPiece, 16); }
    REQUIRE(b.metric_becomes("pegaflow_clients", 0));
    EngineAt other_pages(b, kPiece, 16);
    REQUIRE_FALSE(other_pages.engine->save(numbers_from(1, 8), blocks_from(0, 8)).error);

    CHECK(on_a.engine->lookup(numbers_from(1, 8)).value().blocks == 0);
    const auto claimed = on_a.engine->claim(numbers_from(1, 8)).value();
    CHECK(claimed.blocks == 0);
    if (claimed.blocks != 0) on_a.load_and_check(claimed, 1);
  }

  TEST_CASE("blocks of other models and of other page sizes are never shared") {
    const TwoNodes two;
    const auto& [at, a, b] = two;
    EngineAt on_a(a, kPiece, 16);
    EngineAt other_pages(b, kPiece / 2, 16);
    REQUIRE(sees(b, at[0]));
    on_a.engine->save(numbers_from(1, 8), blocks_from(0, 8));

    CHECK(other_pages.engine->lookup(numbers_from(1, 8)).value().blocks == 0);
    CHECK(other_pages.engine->claim(numbers_from(1, 8)).value().blocks == 0);
    EngineMemory memory = engine_memory(2, kPiece, 16);
    const auto device = HostDevice::create({}).value();
    TestEngine::Options options;
    options.socket = b.socket();
    options.instance = "other";
    options.model = "other model";
    TestEngine other_model(std::move(options), memory, *device);
    other_model.wait_ready();
    CHECK(other_model.lookup(numbers_from(1, 8)).value().blocks == 0);
  }

  TEST_CASE("a reset at one node is one at both, and blocks claimed in between stay forgotten") {
    const TwoNodes two;
    const auto& [at, a, b] = two;
    EngineAt on_a(a, kPiece, 16);
    EngineAt on_b(b, kPiece, 16);
    REQUIRE(sees(b, at[0]));
    on_a.engine->save(numbers_from(1, 8), blocks_from(0, 8));

    REQUIRE(sees(a, at[1]));

    REQUIRE(on_b.engine->session().reset_cache(kHang));
    const auto between = on_b.engine->claim(numbers_from(1, 8)).value();
    CHECK(between.blocks == 0);
    CHECK(on_a.engine->lookup(numbers_from(1, 8)).value().blocks == 0);
    CHECK(a.metric("pegaflow_namespace_resets_total{origin=\"peer\"}") == 1);
    CHECK(b.metric("pegaflow_namespace_resets_total{origin=\"here\"}") == 1);
    CHECK(b.metric("pegaflow_reset_unconfirmed_nodes_total") == 0);
    REQUIRE(on_a.engine->session().reset_cache(kHang));
    CHECK(on_b.engine->claim(numbers_from(1, 8)).value().blocks == 0);
    CHECK(on_a.engine->claim(numbers_from(1, 8)).value().blocks == 0);

    // Blocks that are saved from then on are shared as before.
    on_a.engine->save(numbers_from(1, 8), blocks_from(0, 8));
    CHECK(on_b.engine->lookup(numbers_from(1, 8)).value().coming == 8);
  }

  TEST_CASE("a client of an older version finds local blocks only") {
    const TwoNodes two;
    const auto& [at, a, b] = two;
    EngineAt on_a(a, kPiece, 16);
    Mover::Options old_mover = patient_mover();
    old_mover.link.maximum_version = 2;
    LinkOptions old_link = patient_link();
    old_link.maximum_version = 2;
    EngineMemory memory = engine_memory(2, kPiece, 16);
    const auto device = HostDevice::create({}).value();
    TestEngine::Options options;
    options.socket = b.socket();
    options.mover = old_mover;
    options.session = std::move(old_link);
    TestEngine old(std::move(options), memory, *device);
    old.wait_ready();
    REQUIRE(sees(b, at[0]));
    on_a.engine->save(numbers_from(1, 8), blocks_from(0, 8));
    old.save(numbers_from(1, 2), blocks_from(0, 2));

    CHECK(old.lookup(numbers_from(1, 8)).value().blocks == 2);
    const auto claimed = old.claim(numbers_from(1, 8)).value();
    CHECK(claimed.blocks == 2);
    CHECK(old.load(claimed.token, blocks_from(4, 2)).blocks == 2);
  }

  TEST_CASE("contradictory options are rejected at the start") {
    const auto refused = [](std::vector<std::string> arguments) {
      arguments.insert(arguments.end(), {"--pool-size", "1mb", "--addr", "unix:/tmp/never.sock"});
      const Ran ran = run_server_binary(arguments);
      CHECK(ran.exit_code == 1);
      return ran.output;
    };
    CHECK(has(refused({"--require-rdma"}), "need --peers or --peer-listen"));
    CHECK(has(refused({"--nics", "mlx5_0"}), "need --peers or --peer-listen"));
    CHECK(has(refused({"--require-rdma", "--nics", "none", "--peers", "x:1"}), "contradict"));
    CHECK(has(refused({"--peers", "nowhere"}), "\"nowhere\" is not HOST:PORT"));
    CHECK(has(refused({"--peer-listen", "0.0.0.0:0"}), "--peer-fabric-listen"));
    CHECK(has(refused({"--peer-listen", "127.0.0.1:0", "--peer-secret-file", "/nowhere/x"}),
              "/nowhere/x: cannot be read"));
  }
}

}  // namespace
}  // namespace pegaflow::testing
