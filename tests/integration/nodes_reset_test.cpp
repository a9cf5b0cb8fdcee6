// Weights are replaced under traffic on three nodes: no node serves a block of before a reset after
// it, whether requests and resets alternate or overlap.
#include <algorithm>
#include <array>
#include <csignal>
#include <exception>
#include <random>
#include <thread>

#include "tests/support/reset_traffic.h"
#include "tests/support/seed.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = ResetEngine::kPiece;
constexpr std::size_t kBlocks = ResetEngine::kBlocks;
const std::string kUnconfirmed = "pegaflow_reset_unconfirmed_nodes_total";
const std::string kFromPeers = "pegaflow_namespace_resets_total{origin=\"peer\"}";

ServerProcess::Options lender_options(const std::string& address) {
  return {.pool_size = "64mb", .arguments = {"--peer-listen", address, "--nics", "none"}};
}

ServerProcess::Options reader_options(const std::string& address) {
  return {.pool_size = "64mb",
          .arguments = {"--peers", address, "--nics", "none", "--peer-deadline", "5s",
                        "--fetch-deadline", "8s"}};
}

/// Three nodes with an engine each.
struct Cluster {
  Cluster() {
    for (std::size_t i = 0; i < servers.size(); ++i) {
      engines.push_back(std::make_unique<ResetEngine>(servers[i], i, history));
      for (std::size_t j = 0; j < servers.size(); ++j) {
        if (i != j) REQUIRE(sees(servers[i], at[j]));
      }
    }
  }

  /// Resets at one node; true if all nodes have confirmed. No other caller resets at that node
  /// meanwhile.
  bool reset(std::size_t node) {
    const std::uint64_t now = history.begin_reset();
    const double unconfirmed = servers[node].metric(kUnconfirmed);
    if (!engines[node]->engine().session().reset_cache(kHang)) return false;
    if (servers[node].metric(kUnconfirmed) != unconfirmed) return false;
    for (std::size_t i = 0; i < servers.size(); ++i) history.end_reset(now, i);
    return true;
  }

  void check() const {
    for (const auto& engine : engines) {
      for (const std::string& complaint : engine->complaints) FAIL_CHECK(complaint);
    }
  }
  [[nodiscard]] std::size_t looked_at() const {
    std::size_t sum = 0;
    for (const auto& engine : engines) sum += engine->looked_at;
    return sum;
  }
  [[nodiscard]] std::size_t from_peers() const {
    std::size_t sum = 0;
    for (const auto& engine : engines) sum += engine->from_peers;
    return sum;
  }

  std::vector<std::string> at = node_addresses(3);
  std::array<ServerProcess, 3> servers{ServerProcess(node_options(at[0], at)),
                                       ServerProcess(node_options(at[1], at)),
                                       ServerProcess(node_options(at[2], at))};
  ResetHistory history{3};
  std::vector<std::unique_ptr<ResetEngine>> engines;
};

TEST_SUITE("resets of nodes") {
  TEST_CASE(
      "requests and resets at three nodes in any order: no block of before a reset is served") {
    std::mt19937_64 random(seed());
    MESSAGE("seed ", seed());
    Cluster cluster;
    std::size_t resets = 0;
    for (int i = 0; i < 240; ++i) {
      const std::size_t node = random() % 3;
      if (random() % 8 == 0) {
        REQUIRE(cluster.reset(node));
        ++resets;
      } else {
        cluster.engines[node]->request(random() % 4, 1 + random() % 20);
      }
    }
    cluster.check();
    CHECK(resets > 10);
    CHECK(cluster.looked_at() > 200);
    CHECK(cluster.from_peers() > 50);
  }

  TEST_CASE("concurrent requests and resets at three nodes: no block of before a reset is served") {
    MESSAGE("seed ", seed());
    Cluster cluster;
    std::array<std::size_t, 3> confirmed{};
    std::vector<std::thread> nodes;
    for (std::size_t node = 0; node < 3; ++node) {
      nodes.emplace_back([&cluster, &confirmed, node] {
        std::mt19937_64 random(seed() + node);
        try {
          for (int i = 0; i < 150; ++i) {
            if (random() % 10 != 0) {
              cluster.engines[node]->request(random() % 3, 1 + random() % 20);
            } else if (cluster.reset(node)) {
              ++confirmed[node];
            }
          }
        } catch (const std::exception& problem) {
          cluster.engines[node]->complaints.emplace_back(problem.what());
        }
      });
    }
    for (std::thread& node : nodes) node.join();

    cluster.check();
    // After the traffic and one more reset, none of its blocks is found.
    REQUIRE(cluster.reset(0));
    for (std::size_t node = 0; node < 3; ++node) {
      for (std::uint64_t chain = 0; chain < 3; ++chain) {
        const auto found = cluster.engines[node]->engine().claim(numbers_from(1 + chain * 100, 20));
        CHECK(found.value().blocks == 0);
      }
    }
    CHECK(confirmed[0] + confirmed[1] + confirmed[2] > 5);
    CHECK(cluster.looked_at() > 200);
    CHECK(cluster.from_peers() > 20);
  }

  TEST_CASE("a weight update, engine by engine: after the last reset all serve the new weights") {
    std::mt19937_64 random(seed());
    Cluster cluster;
    for (std::uint64_t update = 0; update < 4; ++update) {
      std::array<std::size_t, 3> order{0, 1, 2};
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t node : order) {
        cluster.engines[random() % 3]->request(0, 16);
        REQUIRE(cluster.reset(node));
        cluster.engines[random() % 3]->request(0, 16);
      }
      for (const auto& engine : cluster.engines) engine->request(0, 16);
    }
    cluster.check();
    CHECK(cluster.from_peers() != 0);
  }

  TEST_CASE("a node that was stopped during a reset is named, and serves no old block afterwards") {
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
    const auto reset = on_a.engine->session().reset_cache(kHang);
    REQUIRE(reset);
    CHECK(reset->unconfirmed == std::vector{at[1]});
    CHECK(a.metric(kUnconfirmed) == 1);
    b.signal(SIGCONT);

    // It learns of the reset from the next request or greeting, before any node reads from it.
    REQUIRE(b.metric_becomes(kFromPeers, 1));
    CHECK(on_b.engine->lookup(numbers_from(1, 8)).value().blocks == 0);
    CHECK(on_a.engine->claim(numbers_from(1, 8)).value().blocks == 0);
  }

  TEST_CASE("a reset at a node that only lends reaches the nodes that read from it") {
    const std::vector<std::string> at = node_addresses(1);
    const ServerProcess lender(lender_options(at[0]));
    const ServerProcess reader(reader_options(at[0]));
    EngineAt on_lender(lender, kPiece, kBlocks);
    EngineAt on_reader(reader, kPiece, kBlocks);
    REQUIRE(sees(reader, at[0]));
    REQUIRE_FALSE(on_lender.engine->save(numbers_from(1, 8), blocks_from(0, 8)).error);
    const auto fetch = [&]() {
      const auto claimed = on_reader.engine->claim(numbers_from(1, 8)).value();
      REQUIRE(claimed.coming == 8);
      on_reader.load_and_check(claimed, 1);
      on_reader.engine->session().unclaim(claimed.token);
      REQUIRE(on_reader.engine->lookup(numbers_from(1, 8)).value().blocks == 8);
    };
    fetch();

    auto reset = on_lender.engine->session().reset_cache(kHang);
    REQUIRE(reset);
    CHECK(lender.metric(kUnconfirmed) == static_cast<double>(reset->unconfirmed.size()));
    // It is confirmed unless this machine is too busy to respond in 0.4 s.
    if (!reset->unconfirmed.empty()) REQUIRE(reader.metric_becomes(kFromPeers, 1));
    CHECK(on_reader.engine->lookup(numbers_from(1, 8)).value().blocks == 0);

    // A stopped node is named by its host: it has no address of its own.
    REQUIRE_FALSE(on_lender.engine->save(numbers_from(1, 8), blocks_from(0, 8)).error);
    fetch();
    reader.signal(SIGSTOP);
    reset = on_lender.engine->session().reset_cache(kHang);
    REQUIRE(reset);
    CHECK(reset->unconfirmed == std::vector<std::string>{"127.0.0.1"});
    reader.signal(SIGCONT);
    REQUIRE(reader.metric_becomes(kFromPeers, 2));
    CHECK(on_reader.engine->lookup(numbers_from(1, 8)).value().blocks == 0);
  }

  TEST_CASE("a reset is forwarded along a chain of nodes of which each reads from the next") {
    const std::vector<std::string> at = node_addresses(2);
    const ServerProcess first(lender_options(at[0]));
    const ServerProcess second(node_options(at[1], {at[0]}));
    const ServerProcess third(reader_options(at[1]));
    const EngineAt on_first(first, kPiece, kBlocks);
    const EngineAt on_second(second, kPiece, kBlocks);
    const EngineAt on_third(third, kPiece, kBlocks);
    REQUIRE(sees(second, at[0]));
    REQUIRE(sees(third, at[1]));
    REQUIRE(on_first.engine->session().reset_cache(kHang));
    REQUIRE(second.metric_becomes(kFromPeers, 1));
    REQUIRE(third.metric_becomes(kFromPeers, 1));
    REQUIRE(on_third.engine->session().reset_cache(kHang));
    REQUIRE(second.metric_becomes(kFromPeers, 2));
    REQUIRE(first.metric_becomes(kFromPeers, 1));
  }

  TEST_CASE("a restarted node learns the epochs, and its next reset is above them") {
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
