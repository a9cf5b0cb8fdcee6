// A server on machines with several NUMA nodes, as far as their files and a filter that answers
// mbind() present them: this machine may have one.
#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "engine/types/numa_ranges.h"
#include "tests/support/numa_machines.h"
#include "tests/support/server_process.h"
#include "tests/support/skip.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

constexpr std::uint64_t kPool = std::uint64_t{64} << 20;
constexpr std::uint64_t kPage = 64 * 1024;
const char* const kRefused = "1";  // EPERM, like Docker's filter.
const char* const kGranted = "0";
static_assert(EPERM == 1);

/// A server on that machine; no value if this process may not present one.
std::unique_ptr<ServerProcess> server_on(const NumaFiles& machine, const std::string& mbind,
                                         std::vector<std::string> arguments = {}) {
  const std::string root = machine.sources().sysfs.parent_path().string();
  auto server = std::make_unique<ServerProcess>(
      ServerProcess::Options{.arguments = std::move(arguments),
                             .command_prefix = {PEGA_ON_MACHINE, root, mbind},
                             .wait_until_ready = false});
  try {
    server->wait_until_ready();
  } catch (const std::runtime_error& ended) {
    if (std::string(ended.what()).find("ended with 77") == std::string::npos) throw;
    note_skip("this process may not present a machine with NUMA nodes");
    return nullptr;
  }
  return server;
}

nlohmann::json placement_of(const ServerProcess& server) {
  return nlohmann::json::parse(server.get("/health").body).at("numa");
}

std::vector<std::uint32_t> nodes_in(const nlohmann::json& placement) {
  std::vector<std::uint32_t> nodes;
  for (const auto& node : placement.at("nodes")) nodes.push_back(node.at("node"));
  return nodes;
}

/// An engine with a rank on each of these NUMA nodes; -1 for a rank that names none.
struct Ranks {
  Ranks(const ServerProcess& server, kj::AsyncIoContext& io, const std::string& name,
        const std::vector<std::int32_t>& nodes) {
    for (std::uint32_t rank = 0; rank < nodes.size(); ++rank) {
      workers.push_back(std::make_unique<WireClient>(io, server.socket()));
      workers.back()->hello();
      REQUIRE(workers.back()->register_rank({.instance = name,
                                             .rank = rank,
                                             .ranks = static_cast<std::uint32_t>(nodes.size()),
                                             .shard = rank,
                                             .shards = static_cast<std::uint32_t>(nodes.size()),
                                             .node = nodes[rank],
                                             .factors = {{"model", name}},
                                             .page_bytes = kPage,
                                             .block_count = 100}));
    }
  }

  /// The index of the part, of `parts` parts of the pool, that holds the pages of these blocks of a
  /// rank; no value if they lie in several.
  std::optional<std::size_t> part_of(std::size_t rank, std::uint32_t parts) {
    const JobId job{.scheduler = scheduler, .number = 1};
    const auto slots = workers[rank]->reserve(job, make_keys(1, 20));
    REQUIRE(slots);
    const auto ranges = engine::numa_ranges(kPool, parts);
    std::optional<std::size_t> found;
    for (const std::uint32_t slot : *slots) {
      REQUIRE(slot != ~std::uint32_t{0});
      std::size_t part = 0;
      while (slot * kSlotAlignment >= ranges[part].end) ++part;
      if (found && *found != part) return std::nullopt;
      found = part;
    }
    return found;
  }

  std::vector<std::unique_ptr<WireClient>> workers;
  Id128 scheduler = Id128::random();
};

TEST_SUITE("NUMA") {
  TEST_CASE("each NUMA node has its part of the pool, and a rank's pages lie on its node") {
    const NumaFiles machine(eight_nodes());
    const auto server = server_on(machine, kGranted);
    if (!server) return;
    auto io = kj::setupAsyncIo();

    const auto placement = placement_of(*server);
    CHECK(placement.at("policy") == "auto");
    CHECK(nodes_in(placement) == std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(placement.at("nodes").at(0).at("bytes") == kPool / 8);
    CHECK_FALSE(placement.contains("refused"));

    Ranks one(*server, io, "one rank", {5});
    CHECK(one.part_of(0, 8) == 5);
    Ranks four(*server, io, "four ranks", {7, 0, 3, 0});
    CHECK(four.part_of(0, 8) == 7);
    CHECK(four.part_of(1, 8) == 0);
    CHECK(four.part_of(2, 8) == 3);
    CHECK(four.part_of(3, 8) == 0);
    // Ranks that name no NUMA node, or an unknown one, get the nodes in turn, and the next engine's
    // ranks continue with the next node.
    Ranks nowhere(*server, io, "nowhere", {-1, 99, -1});
    const auto first = nowhere.part_of(0, 8);
    REQUIRE(first);
    CHECK(nowhere.part_of(1, 8) == (*first + 1) % 8);
    CHECK(nowhere.part_of(2, 8) == (*first + 2) % 8);
    Ranks another(*server, io, "another", {-1});
    const auto other = another.part_of(0, 8);
    REQUIRE(other);
    CHECK(other != first);
  }

  TEST_CASE("a rank on a NUMA node without memory gets the nearest one") {
    NumaMachine machine = memoryless_nodes();
    machine.nodes[1].distance = "32 10 16 32";
    machine.nodes[3].distance = "16 32 32 10";
    const NumaFiles files(machine);
    const auto server = server_on(files, kGranted);
    if (!server) return;
    auto io = kj::setupAsyncIo();
    CHECK(nodes_in(placement_of(*server)) == std::vector<std::uint32_t>{0, 2});

    Ranks ranks(*server, io, "engine", {0, 1, 2, 3});
    CHECK(ranks.part_of(0, 2) == 0);
    CHECK(ranks.part_of(1, 2) == 1);
    CHECK(ranks.part_of(2, 2) == 1);
    CHECK(ranks.part_of(3, 2) == 0);
  }

  TEST_CASE("pages that came from another NUMA node are reported") {
    const NumaFiles machine(two_sockets());
    const auto server = server_on(machine, kGranted);  // This kernel does not act on it.
    if (!server) return;
    const auto placement = placement_of(*server);
    if (!placement.contains("in_place")) PEGA_SKIP("this kernel does not report where a page is");
    if (NumaTopology::read().nodes().size() != 1)
      PEGA_SKIP("a machine with one NUMA node is needed");
    CHECK(placement.at("in_place") == 0.5);
    CHECK(server->log().find("too little free memory") != std::string::npos);
  }

  TEST_CASE("if mbind is rejected the pool lies anywhere, and the log names the fix") {
    const NumaFiles machine(two_sockets());
    const auto server = server_on(machine, kRefused);
    if (!server) return;
    auto io = kj::setupAsyncIo();

    const auto placement = placement_of(*server);
    CHECK(placement.at("policy") == "off");
    CHECK(nodes_in(placement).empty());
    CHECK(placement.at("refused").get<std::string>().find("SYS_NICE") != std::string::npos);
    CHECK(server->log().find("not placed by NUMA node") != std::string::npos);

    Ranks ranks(*server, io, "engine", {1, 0});  // It is served all the same.
    CHECK(ranks.part_of(0, 1) == 0);
    CHECK(ranks.part_of(1, 1) == 0);
  }

  TEST_CASE("--numa interleave and --numa off leave the pool in one piece") {
    const NumaFiles machine(four_nodes());
    const auto interleaved = server_on(machine, kGranted, {"--numa", "interleave"});
    if (!interleaved) return;
    CHECK(placement_of(*interleaved).at("policy") == "interleave");
    CHECK(nodes_in(placement_of(*interleaved)) == std::vector<std::uint32_t>{0, 1, 2, 3});

    const auto off = server_on(machine, kRefused, {"--numa", "off"});
    REQUIRE(off);
    const auto placement = placement_of(*off);
    CHECK(placement.at("policy") == "off");
    CHECK_FALSE(placement.contains("refused"));  // No policy was applied.
  }

  TEST_CASE("with one NUMA node every policy is the same") {
    const NumaFiles machine(one_node());
    for (const char* const policy : {"auto", "interleave", "off"}) {
      const auto server = server_on(machine, kRefused, {"--numa", policy});
      if (!server) return;
      const auto placement = placement_of(*server);
      CHECK(placement.at("policy") == "off");
      CHECK(nodes_in(placement).empty());
      CHECK_FALSE(placement.contains("refused"));
    }
  }
}

}  // namespace
}  // namespace pegaflow::testing
