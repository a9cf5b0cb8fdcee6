// A node that is cut off from the directory while all others are not: real servers in network
// namespaces, and packets between that node and Redis that vanish. Every request is answered, the
// others go on with the directory, and what was saved meanwhile is found after healing.
#include <chrono>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <sys/stat.h>

#include <doctest/doctest.h>

#include "harness/redis_process.h"
#include "tests/support/nodes.h"
#include "tests/support/test_network.h"

namespace pegaflow::testing {
namespace {

using harness::RedisProcess;

constexpr std::size_t kPiece = std::size_t{8} << 10;
constexpr std::size_t kBlocks = 600;  // Some 19 anchors.
constexpr std::size_t kNodes = 3;

/// Three nodes that know each other by the directory alone, and its server on a fourth machine.
class Cluster {
 private:
  const TestNetwork network_{kNodes + 1};  // Before the processes in it.
  TemporaryDirectory scratch_;
  std::unique_ptr<RedisProcess> redis_;

 public:
  Cluster() {
    const TestNetwork::Node& there = network_[kNodes];
    auto started = RedisProcess::start({.address = there.control_address() + ":6379",
                                        .arguments = {"--bind", there.control_address(),
                                                      there.address(), "--protected-mode", "no"},
                                        .command_prefix = there.prefix()});
    REQUIRE_MESSAGE(started, (started ? std::string() : started.error().detail));
    redis_ = std::make_unique<RedisProcess>(std::move(*started));
    const std::string secret = scratch_.path() / "peers.secret";
    std::ofstream(secret) << "0123456789abcdef0123456789abcdef\n";
    ::chmod(secret.c_str(), 0600);
    for (std::size_t i = 0; i < kNodes; ++i) {
      ServerProcess::Options options{.pool_size = "64mb"};
      options.arguments = {"--directory",
                           "redis://" + there.address() + ":6379",
                           "--peer-listen",
                           network_[i].address() + ":50055",
                           "--peer-secret-file",
                           secret,
                           "--peer-networks",
                           "10.77.0.0/24",
                           "--peer-deadline",
                           "5s",
                           "--fetch-deadline",
                           "8s",
                           "--nics",
                           "none"};
      options.command_prefix = network_[i].prefix();
      options.http_host = network_[i].control_address();
      servers.push_back(std::make_unique<ServerProcess>(std::move(options)));
      engines.push_back(std::make_unique<EngineAt>(*servers[i], kPiece, kBlocks));
    }
    for (const auto& each : servers)
      REQUIRE(each->metric_becomes("pegaflow_directory_nodes", kNodes));
  }

  void save(std::size_t node, std::uint64_t first) {
    REQUIRE_FALSE(
        engines[node]->engine->save(numbers_from(first, kBlocks), blocks_from(0, kBlocks)).error);
  }
  [[nodiscard]] std::size_t look_up(std::size_t node, std::uint64_t first) const {
    return engines[node]->engine->lookup(numbers_from(first, kBlocks)).value().blocks;
  }
  /// Whether the node comes to find all of the blocks.
  [[nodiscard]] bool finds(std::size_t node, std::uint64_t first) const {
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (std::chrono::steady_clock::now() < end) {
      if (look_up(node, first) == kBlocks) return true;
    }
    return false;
  }
  void cut(std::size_t node) const { network_[node].cut_from(network_[kNodes]); }
  void mend(std::size_t node) const { network_[node].mend_to(network_[kNodes]); }

  std::vector<std::unique_ptr<ServerProcess>> servers;
  std::vector<std::unique_ptr<EngineAt>> engines;
};

TEST_SUITE("directory_partition") {
  TEST_CASE("a node that is cut off from the directory serves on, and is found again after it") {
    Cluster cluster;
    ServerProcess& cut_off = *cluster.servers[1];
    cluster.save(0, 1000);
    REQUIRE(cluster.finds(1, 1000));

    cluster.cut(1);
    REQUIRE(cut_off.metric_becomes("pegaflow_directory_usable", 0));
    // The link to the first node is there.
    CHECK(cluster.finds(1, 1000));
    for (std::uint64_t i = 0; i < 20; ++i) CHECK(cluster.look_up(1, 100'000 + 1000 * i) == 0);
    cluster.save(1, 2000);
    CHECK(cluster.look_up(1, 2000) == kBlocks);
    // The others have no such trouble.
    cluster.save(2, 3000);
    CHECK(cluster.finds(0, 3000));
    CHECK(cluster.servers[0]->metric("pegaflow_directory_usable") == 1);
    CHECK(cluster.servers[2]->metric("pegaflow_directory_usable") == 1);
    CHECK(cluster.look_up(2, 2000) == 0);

    cluster.mend(1);
    CHECK(cut_off.metric_becomes("pegaflow_directory_usable", 1));
    CHECK(cluster.finds(2, 2000));
    CHECK(cluster.finds(1, 3000));
  }
}

}  // namespace
}  // namespace pegaflow::testing
