// Nodes that read from each other by RDMA, and failures of that: over two software cards, in the
// guest of vm.sh. In every case loaded bytes are right, and other blocks are named.
//
// With UCX older than 1.14 as Debian builds it, an assertion ends the process that is greeting a
// peer when that peer dies. So nodes are killed here after they were greeted, and the moment before
// is not tested.
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include <doctest/doctest.h>

#include "tests/support/rdma_nodes.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = std::size_t{64} << 10;
constexpr std::size_t kBlocks = 96;  // 12 MiB: some 200 ms in flight here.

/// Runs `ip` or `tc`.
void run(const std::string& command) {
  // A test, in a guest of its own. NOLINTNEXTLINE(cert-env33-c,concurrency-mt-unsafe)
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
}

/// Shapes the wire between the cards as `how`, in both directions, while this object lives.
class Wire {
 public:
  explicit Wire(const std::string& how) {
    for (const char* const end : {"rv0", "rv1"}) {
      run(fmt::format("tc qdisc add dev {} root netem {}", end, how));
    }
  }
  ~Wire() {
    for (const char* const end : {"rv0", "rv1"}) {
      // NOLINTNEXTLINE(cert-env33-c,concurrency-mt-unsafe)
      (void)std::system(fmt::format("tc qdisc del dev {} root", end).c_str());
    }
  }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;
};

/// Node B reads blocks of node A.
struct Pair {
  explicit Pair(const std::vector<std::string>& more_of_b = {}, const std::string& pool_b = "64mb")
      : a(rdma_node(0, at, {}, "128mb")),
        b(rdma_node(1, at, more_of_b, pool_b)),
        on_b(b, kPiece, kBlocks) {
    REQUIRE(reads_over(b, at[0], "rdma"));
    // The other direction, too, so that no greeting is pending.
    REQUIRE(reads_over(a, at[1], "rdma"));
  }

  /// Neither server has exited by itself.
  void check_alive() {
    for (ServerProcess* const server : {&a, &b}) {
      const auto ended = server->wait_for_exit(std::chrono::seconds(0));
      REQUIRE_MESSAGE(!ended, server->log());
    }
  }
  void save_at_a(std::uint64_t first) {
    check_alive();
    EngineAt on_a(a, kPiece, kBlocks);
    REQUIRE(on_a.engine->save(numbers_from(first, kBlocks), blocks_from(0, kBlocks)).blocks ==
            kBlocks);
  }
  Mover::Finished load_and_check(const CacheSession::Answer& claimed, std::uint64_t first) {
    return on_b.load_and_check(claimed, first);
  }
  /// Reads a whole prefix of A at B, over `lane`.
  void check_read(std::uint64_t first, const std::string& lane) {
    const std::string bytes = fmt::format("pegaflow_fetch_lane_bytes_total{{lane=\"{}\"}}", lane);
    const double before = b.metric(bytes);
    save_at_a(first);
    const auto claimed = on_b.engine->claim(numbers_from(first, kBlocks)).value();
    CHECK(claimed.blocks == kBlocks);
    CHECK(load_and_check(claimed, first).blocks == kBlocks);
    CHECK(b.metric(bytes) - before == 2.0 * kPiece * kBlocks);
  }
  void check_rest() {
    check_alive();
    check_nothing_is_left(b, std::nullopt);  // A may have been killed.
  }

  std::vector<std::string> at = node_addresses(2);
  ServerProcess a;
  ServerProcess b;
  EngineAt on_b;
};

TEST_SUITE("nodes over cards") {
  TEST_CASE("a node is killed in the middle of a read, and restarts under its name") {
    Pair pair;
    for (std::uint64_t round = 0; round < 2; ++round) {
      const std::uint64_t first = 1 + 1000 * round;
      pair.save_at_a(first);
      const auto claimed = pair.on_b.engine->claim(numbers_from(first, kBlocks)).value();
      pair.a.kill();
      CHECK(claimed.blocks > 0);
      pair.load_and_check(claimed, first);
      CHECK(sees_no_more(pair.b, pair.at[0]));
      pair.check_rest();

      // Another process with other keys; B has no state of it from the first one.
      pair.a.start();
      REQUIRE(reads_over(pair.b, pair.at[0], "rdma"));
      REQUIRE(reads_over(pair.a, pair.at[1], "rdma"));
      pair.check_read(first + 500, "rdma");
    }
  }

  TEST_CASE("the wire goes dead in the middle of a read: sockets continue, and RDMA recovers") {
    // Not by `ip link set down`: Soft-RoCE then breaks queue pairs that a card keeps, and UCX ends
    // the process for it.
    Pair pair;
    pair.save_at_a(1);
    {
      const auto claimed = pair.on_b.engine->claim(numbers_from(1, kBlocks)).value();
      const Wire dead("loss 100%");
      pair.load_and_check(claimed, 1);

      // The next read detects it, if this one did not.
      for (std::uint64_t first = 1001; pair.b.metric(lane_sample(pair.at[0], "rdma")) == 1;
           first += 1000) {
        REQUIRE(first < 10000);
        pair.save_at_a(first);
        pair.load_and_check(pair.on_b.engine->claim(numbers_from(first, kBlocks)).value(), first);
      }
      CHECK(reads_over(pair.b, pair.at[0], "tcp"));
      pair.check_read(20001, "tcp");
      // No peer was lost: only one of two lanes failed.
      CHECK(pair.b.metric(fmt::format("pegaflow_peer_losses_total{{peer=\"{}\"}}", pair.at[0])) ==
            0);
    }
    CHECK(reads_over(pair.b, pair.at[0], "rdma"));
    pair.check_read(30001, "rdma");
    pair.check_rest();
  }

  TEST_CASE("a network that loses every hundredth packet loses no block") {
    Pair pair;
    const Wire lossy("loss 1%");
    pair.check_read(1, "rdma");
    pair.check_rest();
  }

  TEST_CASE("abandoned reads never write into a slot that has another block") {
    // Slower than the deadline: most of each read is in flight when it is abandoned.
    Pair pair({"--fetch-deadline", "300ms"}, "32mb");
    const std::string unquiesced = "pegaflow_fetch_troubles_total{reason=\"unsettled\"}";
    TestEngine& other = *pair.on_b.engine;
    const Wire slow("delay 20ms rate 60mbit limit 100000");
    for (std::uint64_t round = 0; round < 3; ++round) {
      const std::uint64_t first = 1 + 1000 * round;
      const double before = pair.b.metric(unquiesced);
      pair.save_at_a(first);
      const auto claimed = pair.on_b.engine->claim(numbers_from(first, kBlocks)).value();
      CHECK(claimed.coming > 0);
      CHECK(pair.load_and_check(claimed, first).failed_blocks.size() > 0);
      CHECK(pair.b.metric(unquiesced) > before);

      // Then the pool is filled with other blocks, more than fit.
      for (std::uint64_t job = 0; job < 4; ++job) {
        const auto mine = numbers_from(100000 * (round + 1) + 1000 * job, kBlocks);
        other.save(mine, blocks_from(0, kBlocks));
      }
      pair.check_rest();

      // The card has done all of its operations: the blocks saved meanwhile are unchanged.
      std::size_t loaded = 0;
      for (std::uint64_t job = 0; job < 4; ++job) {
        const auto mine = numbers_from(100000 * (round + 1) + 1000 * job, kBlocks);
        const auto again = other.claim(mine).value();
        if (again.blocks == 0) continue;
        const auto blocks = blocks_from(0, again.blocks);
        loaded += other.load(again.token, blocks).blocks;
        CHECK(other.wrong_blocks({mine.begin(), mine.begin() + again.blocks}, blocks) == 0);
        other.session().unclaim(again.token);
      }
      CHECK(loaded > 0);
    }
  }
}

}  // namespace
}  // namespace pegaflow::testing
