// Weights are replaced under traffic on three nodes: nothing that was saved before a reset is
// served after it, by any node. The bytes of a block follow from its key and from when it was
// saved.
#include <algorithm>
#include <array>
#include <csignal>
#include <random>
#include <set>

#include "tests/support/nodes.h"
#include "tests/support/seed.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = std::size_t{8} << 10;
constexpr std::size_t kBlocks = 24;
const std::string kUnconfirmed = "pegaflow_reset_unconfirmed_nodes_total";
const std::string kFromPeers = "pegaflow_namespace_resets_total{origin=\"peer\"}";

/// Three nodes with an engine each, and what may be served.
struct Cluster {
  Cluster() {
    for (std::size_t i = 0; i < servers.size(); ++i) {
      engines.push_back(std::make_unique<EngineAt>(servers[i], kPiece, kBlocks));
      for (std::size_t j = 0; j < servers.size(); ++j) {
        if (i != j) REQUIRE(sees(servers[i], at[j]));
      }
    }
  }

  /// Loads what there is of a prefix, looks at each block, and saves the rest.
  void request(std::size_t node, std::uint64_t chain, std::size_t count) {
    const std::uint64_t oldest = last_reset;
    EngineAt& on = *engines[node];
    const auto numbers = numbers_from(1 + chain * 100, count);
    const auto claimed = on.engine->claim(numbers).value();
    if (claimed.blocks != 0) {
      const auto loaded = on.engine->load(claimed.token, blocks_from(0, claimed.blocks));
      const std::set<std::uint32_t> failed(loaded.failed_blocks.begin(),
                                           loaded.failed_blocks.end());
      for (std::uint32_t i = 0; i < claimed.blocks; ++i) {
        if (failed.contains(i)) continue;
        CHECK_MESSAGE(was_saved_since(on.memory, i, numbers[i], oldest), "block ", numbers[i],
                      " at node ", node, ", after the reset at ", oldest);
        ++looked_at;
        if (i >= claimed.blocks - claimed.coming) ++from_peers;
      }
      on.engine->session().unclaim(claimed.token);
    }
    on.engine->weights = ++time;
    const std::vector<std::uint64_t> rest(
        numbers.begin() + static_cast<std::ptrdiff_t>(claimed.blocks), numbers.end());
    if (!rest.empty()) on.engine->save(rest, blocks_from(0, rest.size()));
  }

  [[nodiscard]] bool was_saved_since(const EngineMemory& memory, std::uint32_t block,
                                     std::uint64_t number, std::uint64_t since) const {
    for (std::uint64_t saved = since + 1; saved <= time; ++saved) {
      if (memory.holds(block, TestEngine::seed_of(number, saved))) return true;
    }
    return false;
  }

  /// Returns when all nodes have confirmed.
  void reset(std::size_t node) {
    const std::uint64_t now = ++time;
    const double unconfirmed = servers[node].metric(kUnconfirmed);
    REQUIRE(engines[node]->engine->session().reset_cache(kHang));
    REQUIRE(servers[node].metric(kUnconfirmed) == unconfirmed);
    last_reset = now;
  }

  std::vector<std::string> at = node_addresses(3);
  std::array<ServerProcess, 3> servers{ServerProcess(node_options(at[0], at)),
                                       ServerProcess(node_options(at[1], at)),
                                       ServerProcess(node_options(at[2], at))};
  std::vector<std::unique_ptr<EngineAt>> engines;
  std::uint64_t time = 0;        ///< Of saves and resets.
  std::uint64_t last_reset = 0;  ///< Nothing older is right.
  std::size_t looked_at = 0;
  std::size_t from_peers = 0;
};

TEST_SUITE("resets of nodes") {
  TEST_CASE("requests and resets at three nodes in any order: no block of before is served") {
    std::mt19937_64 random(seed());
    MESSAGE("seed ", seed());
    Cluster cluster;
    std::size_t resets = 0;
    for (int i = 0; i < 240; ++i) {
      const std::size_t node = random() % 3;
      if (random() % 8 == 0) {
        cluster.reset(node);
        ++resets;
      } else {
        cluster.request(node, random() % 4, 1 + random() % 20);
      }
    }
    CHECK(resets > 10);
    CHECK(cluster.looked_at > 200);
    CHECK(cluster.from_peers > 50);
  }

  TEST_CASE("a weight update, engine by engine: after the last reset all serve the new weights") {
    std::mt19937_64 random(seed());
    Cluster cluster;
    for (std::uint64_t update = 0; update < 4; ++update) {
      std::array<std::size_t, 3> order{0, 1, 2};
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t node : order) {
        cluster.request(random() % 3, 0, 16);
        cluster.reset(node);
        cluster.request(random() % 3, 0, 16);
      }
      for (std::size_t node = 0; node < 3; ++node) cluster.request(node, 0, 16);
    }
    CHECK(cluster.from_peers != 0);
  }

  TEST_CASE("a node that was stopped during a reset is named, and serves nothing old afterwards") {
    const std::vector<std::string> at = node_addresses(2);
    const ServerProcess a(node_options(at[0], at));
    const ServerProcess b(node_options(at[1], at));
    EngineAt on_a(a, kPiece, kBlocks);
    EngineAt on_b(b, kPiece, kBlocks);
    REQUIRE(sees(a, at[1]));
    REQUIRE(sees(b, at[0]));
    REQUIRE_FALSE(on_b.engine->save(numbers_from(1, 8), blocks_from(0, 8)).error);
    REQUIRE(on_a.engine->lookup(numbers_from(1, 8)).value().coming == 8);

    b.signal(SIGSTOP);
    REQUIRE(on_a.engine->session().reset_cache(kHang));
    CHECK(a.metric(kUnconfirmed) == 1);
    b.signal(SIGCONT);

    // It learns of the reset by the question, or by a greeting, before it is read from.
    REQUIRE(b.metric_becomes(kFromPeers, 1));
    CHECK(on_b.engine->lookup(numbers_from(1, 8)).value().blocks == 0);
    CHECK(on_a.engine->claim(numbers_from(1, 8)).value().blocks == 0);
  }

  TEST_CASE("a node that restarts learns the epochs, and a reset that it makes is above them") {
    const std::vector<std::string> at = node_addresses(2);
    const ServerProcess a(node_options(at[0], at));
    EngineAt on_a(a, kPiece, kBlocks);
    {
      const ServerProcess b(node_options(at[1], at));
      REQUIRE(sees(a, at[1]));
      REQUIRE(on_a.engine->session().reset_cache(kHang));
    }
    const ServerProcess b(node_options(at[1], at));
    REQUIRE(sees(b, at[0]));
    REQUIRE(sees(a, at[1]));
    CHECK(b.metric("pegaflow_epochs") == 1);
    REQUIRE_FALSE(on_a.engine->save(numbers_from(1, 8), blocks_from(0, 8)).error);
    EngineAt on_b(b, kPiece, kBlocks);
    CHECK(on_b.engine->lookup(numbers_from(1, 8)).value().coming == 8);

    REQUIRE(on_b.engine->session().reset_cache(kHang));
    CHECK(on_b.engine->claim(numbers_from(1, 8)).value().blocks == 0);
    CHECK(on_a.engine->lookup(numbers_from(1, 8)).value().blocks == 0);
  }
}

}  // namespace
}  // namespace pegaflow::testing
