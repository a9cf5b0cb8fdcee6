// Weights are replaced while one of three nodes is partitioned: real servers in network namespaces.
// In any order: no node serves a block that was saved before a reset that the node knows, the reset
// names the node that it did not reach, and that node serves no old block once the network is
// whole.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <kj/async-io.h>

#include "tests/support/reset_traffic.h"
#include "tests/support/seed.h"
#include "tests/support/test_network.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kNodes = 3;
constexpr std::size_t kChainBlocks = 12;
/// The numbers of chains of the traffic are below this; those from here on are saved at one node
/// only.
constexpr std::uint64_t kOwnChains = 10;
const std::string kFromPeers = "pegaflow_namespace_resets_total{origin=\"peer\"}";

/// Three nodes with an engine each, and the network between them.
class Cluster {
 public:
  Cluster() {
    for (std::size_t i = 0; i < kNodes; ++i) addresses_.push_back(network_[i].address() + ":50055");
    for (std::size_t i = 0; i < kNodes; ++i) {
      auto options = node_options(addresses_[i], addresses_,
                                  {"--peer-deadline", "200ms", "--fetch-deadline", "1s"});
      options.command_prefix = network_[i].prefix();
      options.http_host = network_[i].control_address();
      servers_.push_back(std::make_unique<ServerProcess>(std::move(options)));
    }
    for (std::size_t i = 0; i < kNodes; ++i) {
      engines.push_back(std::make_unique<ResetEngine>(*servers_[i], i, history));
    }
    meet();
  }

  /// Returns when each node has found a block of each other one. Then all nodes know every reset
  /// that one of them knew: blocks are found in equal epochs only.
  void meet() {
    for (std::size_t i = 0; i < kNodes; ++i) {
      for (std::size_t j = 0; j < kNodes; ++j) {
        if (i == j) continue;
        REQUIRE(sees(*servers_[i], addresses_[j]));
        const auto end = std::chrono::steady_clock::now() + kHang;
        std::vector<std::uint64_t> fresh;
        do {
          REQUIRE(std::chrono::steady_clock::now() < end);
          fresh = {++last_fresh_};
          engines[j]->save(fresh);
        } while (engines[i]->engine().lookup(fresh).value().coming == 0);
      }
    }
    history.all_agree();
  }

  [[nodiscard]] const TestNetwork::Node& link(std::size_t node) const { return network_[node]; }
  [[nodiscard]] const ServerProcess& server(std::size_t node) const { return *servers_[node]; }

  /// Resets at one node. Returns the addresses of the nodes that have not confirmed it.
  std::vector<std::string> reset(std::size_t node) {
    const std::uint64_t now = history.begin_reset();
    WireClient trainer(io_, servers_[node]->socket());
    (void)trainer.hello();
    REQUIRE(trainer.attach("engine"));
    auto answer = trainer.session().resetCacheRequest().send().wait(io_.waitScope);
    REQUIRE_FALSE(answer.hasError());
    std::vector<std::string> unconfirmed;
    for (const auto name : answer.getUnconfirmed()) unconfirmed.emplace_back(name.cStr());
    for (std::size_t i = 0; i < kNodes; ++i) {
      const bool is_named =
          std::find(unconfirmed.begin(), unconfirmed.end(), addresses_[i]) != unconfirmed.end();
      if (!is_named) history.end_reset(now, i);
    }
    REQUIRE(trainer.goodbye());
    std::sort(unconfirmed.begin(), unconfirmed.end());
    return unconfirmed;
  }

  void check() {
    for (const auto& engine : engines) {
      for (const std::string& complaint : engine->complaints) FAIL_CHECK(complaint);
      engine->complaints.clear();
    }
  }

  /// The addresses of the other nodes that `node` does not reach while `cut` is partitioned.
  [[nodiscard]] std::vector<std::string> unreached(std::size_t node, std::size_t cut) const {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < kNodes; ++i) {
      if (i != node && (i == cut || node == cut)) names.push_back(addresses_[i]);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  /// Resets at `node`: the nodes that it does not reach are named, and no other. A node that is
  /// only busy may be named as well; then the reset is repeated, as the documentation requires.
  void check_reset(std::size_t node, std::size_t cut) {
    CAPTURE(node);
    const std::vector<std::string> expected = unreached(node, cut);
    std::vector<std::string> unconfirmed;
    for (int i = 0; i < 10 && unconfirmed != expected; ++i) {
      unconfirmed = reset(node);
      for (const std::string& name : expected) {
        CHECK(std::find(unconfirmed.begin(), unconfirmed.end(), name) != unconfirmed.end());
      }
    }
    CHECK(unconfirmed == expected);
  }

  ResetHistory history{kNodes};

 private:
  kj::AsyncIoContext io_ = kj::setupAsyncIo();
  TestNetwork network_{kNodes};
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<ServerProcess>> servers_;
  std::uint64_t last_fresh_ = 1'000'000;

 public:
  std::vector<std::unique_ptr<ResetEngine>> engines;  ///< After the servers: they end first.
};

/// One random order of events.
class Order {
 public:
  Order(Cluster& cluster, std::uint64_t number, std::mt19937_64& random)
      : cluster_(cluster), number_(number), random_(random), cut_(pick(kNodes)) {}

  void run() {
    CAPTURE(number_);
    CAPTURE(cut_);
    traffic(4 + pick(4));
    for (std::size_t i = 0; i < kNodes; ++i) cluster_.engines[i]->save(own(i));

    const bool is_cable = pick(2) == 0;
    is_cable ? cluster_.link(cut_).pull_cable() : cluster_.link(cut_).cut();
    traffic(pick(3));
    const std::size_t resets = 1 + pick(2);
    for (std::size_t i = 0; i < resets; ++i) {
      cluster_.check_reset(pick(kNodes), cut_);
      traffic(pick(4));
    }
    is_cable ? cluster_.link(cut_).plug_cable() : cluster_.link(cut_).mend();
    // Some nodes find each other earlier than others.
    traffic(2 + pick(6));
    cluster_.meet();
    traffic(4);

    // None of the earlier blocks is found anywhere, by its name either.
    for (std::size_t asker = 0; asker < kNodes; ++asker) {
      for (std::size_t saver = 0; saver < kNodes; ++saver) {
        const auto found = cluster_.engines[asker]->engine().claim(own(saver)).value();
        CHECK_MESSAGE(found.blocks == 0, "node ", asker, " has what node ", saver,
                      " saved before the reset");
      }
    }
    cluster_.check();
  }

 private:
  std::size_t pick(std::size_t count) { return random_() % count; }

  /// Blocks that only one node has saved, in this order.
  [[nodiscard]] std::vector<std::uint64_t> own(std::size_t node) const {
    return numbers_from(1 + 100 * (kOwnChains + kNodes * number_ + node), 4);
  }

  void traffic(std::size_t rounds) {
    for (std::size_t round = 0; round < rounds; ++round) {
      std::array<std::size_t, kNodes> order{0, 1, 2};
      std::shuffle(order.begin(), order.end(), random_);
      for (const std::size_t node : order) {
        cluster_.engines[node]->request(pick(3), 1 + pick(kChainBlocks));
      }
    }
  }

  Cluster& cluster_;
  const std::uint64_t number_;
  std::mt19937_64& random_;
  const std::size_t cut_;
};

TEST_SUITE("resets of a partitioned network") {
  TEST_CASE(
      "weights are replaced while a node is partitioned: no stale block, in any random order") {
    const char* const wanted = std::getenv("PEGA_TEST_PARTITIONS");
    const int orders = wanted == nullptr ? 4 : std::stoi(wanted);
    std::mt19937_64 random(seed());
    Cluster cluster;
    for (int order = 0; order < orders; ++order) {
      Order(cluster, static_cast<std::uint64_t>(order), random).run();
    }
    std::size_t from_peers = 0;
    for (const auto& engine : cluster.engines) from_peers += engine->from_peers;
    CHECK(from_peers != 0);
  }

  TEST_CASE(
      "a node that is partitioned during a reset is named, and learns of it from the greeting") {
    Cluster cluster;
    const auto numbers = numbers_from(1, 8);
    cluster.engines[2]->save(numbers);
    REQUIRE(cluster.engines[0]->engine().lookup(numbers).value().coming == 8);

    cluster.link(2).cut();
    cluster.check_reset(0, 2);
    CHECK(cluster.engines[0]->engine().claim(numbers).value().blocks == 0);
    CHECK(cluster.engines[1]->engine().claim(numbers).value().blocks == 0);
    // Its own engines find them until it can be reached, as docs/nodes.md describes.
    CHECK(cluster.engines[2]->engine().lookup(numbers).value().blocks == 8);
    CHECK(cluster.server(2).metric(kFromPeers) == 0);

    cluster.link(2).mend();
    REQUIRE(cluster.server(2).metric_becomes(kFromPeers, 1));
    cluster.meet();
    for (const auto& engine : cluster.engines) {
      CHECK(engine->engine().claim(numbers).value().blocks == 0);
    }
  }
}

}  // namespace
}  // namespace pegaflow::testing
