// Links between nodes that break or are slow while blocks are in flight: real servers in network
// namespaces. In every case: loaded bytes are right, other blocks are reported as failed, all
// resources are returned, and afterwards the nodes can read from each other again.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include <doctest/doctest.h>

#include "tests/support/nodes.h"
#include "tests/support/test_network.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = std::size_t{256} << 10;
constexpr std::size_t kBlocks = 48;  // 24 MiB, so that the time of a fault is that of slow links.
constexpr double kAllBytes = 2.0 * kPiece * kBlocks;

/// 2.5 MB/s: 8 s for all blocks.
constexpr const char* kSlow = "20mbit";

std::string peer_address(const TestNetwork::Node& node) { return node.address() + ":50055"; }

std::string ready_of(const TestNetwork::Node& node) {
  return fmt::format("pegaflow_peer_ready{{peer=\"{}\"}}", peer_address(node));
}

/// Nodes A and B, each with an engine, and links of both that can break.
class Cluster {
 public:
  explicit Cluster(const std::vector<std::string>& more = {}) {
    start(0, more, a_);
    start(1, more, b_);
    on_a = std::make_unique<EngineAt>(a(), kPiece, kBlocks);
    on_b = std::make_unique<EngineAt>(b(), kPiece, kBlocks);
    greet();
  }

  [[nodiscard]] ServerProcess& a() const { return *a_; }
  [[nodiscard]] ServerProcess& b() const { return *b_; }
  [[nodiscard]] const TestNetwork::Node& link_of_a() const { return network_[0]; }
  [[nodiscard]] const TestNetwork::Node& link_of_b() const { return network_[1]; }

  /// Both can send requests to each other.
  void greet() const {
    REQUIRE(sees(a(), peer_address(network_[1])));
    REQUIRE(sees(b(), peer_address(network_[0])));
  }

  static void save(const EngineAt& at, std::uint64_t first) {
    REQUIRE(at.engine->save(numbers_from(first, kBlocks), blocks_from(0, kBlocks)).blocks ==
            kBlocks);
  }

  /// Claims blocks of the other node.
  static CacheSession::Answer claim(const EngineAt& at, std::uint64_t first) {
    auto claimed = at.engine->claim(numbers_from(first, kBlocks)).value();
    CHECK(claimed.blocks == kBlocks);
    CHECK(claimed.coming == kBlocks);
    return claimed;
  }

  /// Loads a claim: every block is right, or named as failed.
  static Mover::Finished load(const EngineAt& at, const CacheSession::Answer& claimed,
                              std::uint64_t first) {
    return at.load_and_check(claimed, first);
  }

  /// Claims blocks of A over a slow link, and stops A in the middle of the fetch.
  [[nodiscard]] CacheSession::Answer claim_and_stop() const {
    link_of_a().limit_sent(kSlow);
    const std::uint64_t before = link_of_a().sent_bytes();
    auto claimed = claim(*on_b, 1);
    wait_for_bytes(before, 0.05);
    a().signal(SIGSTOP);
    link_of_a().limit_sent("");
    return claimed;
  }
  /// Half of the blocks of a claim, from `first` on.
  void start_load(const CacheSession::Answer& claimed, std::uint32_t first,
                  const LoadPace::Computing& computing) const {
    REQUIRE(on_b->engine->mover().load(++on_b->engine->last_job, claimed.token, first,
                                       blocks_from(first, kBlocks / 2), computing));
  }
  void end(const CacheSession::Answer& claimed) const {
    on_b->engine->session().unclaim(claimed.token);
    check_use(10001);
  }

  /// Returns when at least `share` of A's bytes were sent since `before`.
  void wait_for_bytes(std::uint64_t before, double share) const {
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (static_cast<double>(link_of_a().sent_bytes() - before) < share * kAllBytes) {
      REQUIRE(std::chrono::steady_clock::now() < end);
    }
  }

  /// No state of a fetch or of a lease is left.
  void check_rest() const {
    for (const ServerProcess* server : {a_.get(), b_.get()}) {
      check_nothing_is_left(*server, 1);
      CHECK(server->metric_becomes("pegaflow_leases", 0));
    }
  }

  /// Both nodes can read from each other again, concurrently and in full. The first attempt may
  /// fail: it may detect a connection that did not survive, or miss a deadline on a busy machine.
  void check_use(std::uint64_t first) const {
    greet();
    const auto end = std::chrono::steady_clock::now() + kHang;
    std::size_t whole = 0;
    for (; whole != 2 * kBlocks && std::chrono::steady_clock::now() < end; first += 2 * kBlocks) {
      save(*on_a, first);
      save(*on_b, first + kBlocks);
      const auto at_a = on_a->engine->claim(numbers_from(first + kBlocks, kBlocks)).value();
      const auto at_b = on_b->engine->claim(numbers_from(first, kBlocks)).value();
      whole = at_a.blocks == 0 ? 0 : load(*on_a, at_a, first + kBlocks).blocks;
      whole += at_b.blocks == 0 ? 0 : load(*on_b, at_b, first).blocks;
    }
    CHECK(whole == 2 * kBlocks);
    check_rest();
  }

 private:
  void start(std::size_t number, std::vector<std::string> more,
             std::unique_ptr<ServerProcess>& server) const {
    const TestNetwork::Node& node = network_[number];
    auto options =
        node_options(peer_address(node), {peer_address(network_[0]), peer_address(network_[1])},
                     std::move(more), "256mb");
    options.command_prefix = node.prefix();
    options.http_host = node.control_address();
    server = std::make_unique<ServerProcess>(std::move(options));
  }

  TestNetwork network_{2};
  std::unique_ptr<ServerProcess> a_;
  std::unique_ptr<ServerProcess> b_;

 public:
  std::unique_ptr<EngineAt> on_a;  ///< After the servers, so that it ends before them.
  std::unique_ptr<EngineAt> on_b;
};

/// Sends requests until `server` counts the other node as lost.
void lose(const ServerProcess& server, const TestNetwork::Node& other, const EngineAt& at) {
  while (server.metric(ready_of(other)) != 0) {
    (void)at.engine->lookup(numbers_from(900001, 1));
  }
}

/// Connections that `server` dialed to port 50055 and that its kernel still has, including those
/// that the server has closed.
std::size_t open_to_peer(const ServerProcess& server) {
  constexpr const char* kPort = ":C387";  // 50055
  std::size_t open = 0;
  for (const char* const table : {"net/tcp", "net/tcp6"}) {
    std::ifstream lines(fmt::format("/proc/{}/{}", server.pid(), table));
    std::string number;
    std::string local;
    std::string remote;
    std::string state;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      words >> number >> local >> remote >> state;
      const bool is_dialing = state == "02";  // SYN_SENT: the next attempt.
      if (remote.ends_with(kPort) && !is_dialing && state != "06") ++open;
    }
  }
  return open;
}

TEST_SUITE("links that fail") {
  TEST_CASE(
      "a black hole in the middle of a pull ends it at the deadline, and later lookups do not "
      "wait") {
    const Cluster nodes({"--peer-deadline", "1s", "--fetch-deadline", "3s"});
    Cluster::save(*nodes.on_a, 1);
    nodes.link_of_a().limit_sent(kSlow);
    const std::uint64_t before = nodes.link_of_a().sent_bytes();
    const auto claimed = Cluster::claim(*nodes.on_b, 1);
    nodes.wait_for_bytes(before, 0.05);

    nodes.link_of_a().cut();
    CHECK(Cluster::load(*nodes.on_b, claimed, 1).blocks < kBlocks);
    // A few requests detect it.
    for (int i = 0; i < 4; ++i) {
      CHECK(nodes.on_b->engine->lookup(numbers_from(5001, 4)).value().blocks == 0);
    }
    CHECK(sees_no_more(nodes.b(), peer_address(nodes.link_of_a())));

    nodes.link_of_a().mend();
    nodes.link_of_a().limit_sent("");
    nodes.check_use(10001);
  }

  TEST_CASE("a link that goes down and up: blocks in flight arrive or are named") {
    const Cluster nodes;
    Cluster::save(*nodes.on_a, 1);
    nodes.link_of_a().limit_sent("100mbit");
    const std::uint64_t before = nodes.link_of_a().sent_bytes();
    const auto claimed = Cluster::claim(*nodes.on_b, 1);
    for (int flap = 1; flap <= 5; ++flap) {
      nodes.wait_for_bytes(before, 0.05 * flap);
      nodes.link_of_a().pull_cable();
      nodes.link_of_a().plug_cable();
    }

    CHECK(Cluster::load(*nodes.on_b, claimed, 1).blocks == kBlocks);
    nodes.link_of_a().limit_sent("");
    nodes.check_use(10001);
  }

  TEST_CASE("a slow link: late blocks are computed, and no state is kept for them") {
    const Cluster nodes({"--fetch-deadline", "500ms"});
    Cluster::save(*nodes.on_a, 1);
    nodes.link_of_a().limit_sent(kSlow);
    const auto claimed = Cluster::claim(*nodes.on_b, 1);

    CHECK(Cluster::load(*nodes.on_b, claimed, 1).blocks < kBlocks);
    CHECK(nodes.b().metric("pegaflow_fetch_blocks_total{result=\"given_up\"}") > 0);
    nodes.check_rest();
    // A slow peer is not a lost one.
    CHECK(sees(nodes.b(), peer_address(nodes.link_of_a())));
    nodes.link_of_a().limit_sent("");
  }

  TEST_CASE("the first load of an engine ends before its deadline when its node has stopped") {
    const Cluster nodes({"--peer-deadline", "10s", "--fetch-deadline", "8s"});
    Cluster::save(*nodes.on_a, 1);
    const auto claimed = nodes.claim_and_stop();

    // Its own rate is unknown, so it is not compared with computing.
    nodes.start_load(claimed, 0, LoadPace::Computing{});
    CHECK(nodes.on_b->engine->next_finished().cut == LoadPace::Cut::kStuck);

    nodes.a().signal(SIGCONT);
    nodes.end(claimed);
  }

  TEST_CASE("of two loads from a stopped node one ends, and the other one waits for the node") {
    const Cluster nodes({"--peer-deadline", "10s", "--fetch-deadline", "8s"});
    Cluster::save(*nodes.on_a, 1);
    const auto claimed = nodes.claim_and_stop();

    // Computing takes longer than anything here.
    const LoadPace::Computing computing{.delay = {}, .per_block = std::chrono::seconds(2)};
    nodes.start_load(claimed, 0, computing);
    nodes.start_load(claimed, kBlocks / 2, computing);
    const auto ended = nodes.on_b->engine->next_finished();
    CHECK(ended.cut == LoadPace::Cut::kStuck);
    nodes.a().signal(SIGCONT);
    const auto whole = nodes.on_b->engine->next_finished();

    CHECK_FALSE(whole.cut.has_value());
    CHECK(whole.blocks == kBlocks / 2);
    CHECK(nodes.on_b->engine->wrong_blocks(numbers_from(1, kBlocks), blocks_from(0, kBlocks),
                                           ended.failed_blocks) == 0);
    nodes.end(claimed);
  }

  TEST_CASE("a link that is slow in one direction: requests are small, bytes arrive") {
    const Cluster nodes;
    Cluster::save(*nodes.on_a, 1);
    nodes.link_of_a().limit_received("2mbit");

    CHECK(Cluster::load(*nodes.on_b, Cluster::claim(*nodes.on_b, 1), 1).blocks == kBlocks);
    CHECK(nodes.b().metric("pegaflow_fetch_blocks_total{result=\"given_up\"}") == 0);
    nodes.check_rest();
  }

  TEST_CASE("a reader that is stopped for longer than its lease seals nothing of it") {
    const Cluster nodes;
    Cluster::save(*nodes.on_a, 1);
    nodes.link_of_a().limit_sent(kSlow);
    const std::uint64_t before = nodes.link_of_a().sent_bytes();
    const auto claimed = Cluster::claim(*nodes.on_b, 1);
    nodes.wait_for_bytes(before, 0.1);

    const double whole = nodes.b().metric("pegaflow_fetch_blocks_total{result=\"whole\"}");
    nodes.b().signal(SIGSTOP);
    CHECK(nodes.a().metric_becomes("pegaflow_leases", 0));
    CHECK(nodes.a().metric("pegaflow_leases_total{result=\"ran_out\"}") == 1);
    nodes.link_of_a().limit_sent("");
    // The lent slots hold other blocks by now.
    for (std::uint64_t job = 1; job <= 12; ++job) Cluster::save(*nodes.on_a, 100000 * job);
    CHECK(nodes.a().metric("pegaflow_cache_block_evictions_total") >= kBlocks);
    nodes.b().signal(SIGCONT);

    CHECK(Cluster::load(*nodes.on_b, claimed, 1).blocks <= kBlocks);
    CHECK(nodes.b().metric("pegaflow_fetch_blocks_total{result=\"whole\"}") == whole);
    nodes.check_use(10001);
  }

  TEST_CASE("both nodes dial at the same time, repeatedly, and each reads the other's blocks") {
    const Cluster nodes({"--peer-deadline", "100ms"});
    for (std::uint64_t round = 0; round < 3; ++round) {
      nodes.link_of_a().cut();
      // A peer that does not respond is lost: both nodes detect it, and both dial from now on.
      while (nodes.a().metric(ready_of(nodes.link_of_b())) != 0) {
        (void)nodes.on_a->engine->lookup(numbers_from(900001, 1));
      }
      while (nodes.b().metric(ready_of(nodes.link_of_a())) != 0) {
        (void)nodes.on_b->engine->lookup(numbers_from(900001, 1));
      }
      nodes.link_of_a().mend();
      nodes.check_use(1 + 1000 * round);
    }
  }

  TEST_CASE("after each of many outages every peer has one connection, and no dead one is left") {
    const Cluster nodes({"--peer-deadline", "50ms"});
    const char* const wanted = std::getenv("PEGA_TEST_HOLES");
    const int holes = wanted == nullptr ? 10 : std::stoi(wanted);
    for (int hole = 1; hole <= holes; ++hole) {
      CAPTURE(hole);
      nodes.link_of_a().cut();
      lose(nodes.a(), nodes.link_of_b(), *nodes.on_a);
      lose(nodes.b(), nodes.link_of_a(), *nodes.on_b);
      // Waits until the dialers' kernels have given up: the end of a connection that still exists
      // would arrive when the link is restored, and leave nothing behind.
      const auto end = std::chrono::steady_clock::now() + kHang;
      while (open_to_peer(nodes.a()) + open_to_peer(nodes.b()) != 0) {
        REQUIRE(std::chrono::steady_clock::now() < end);
      }

      nodes.link_of_a().mend();
      nodes.greet();
      for (const ServerProcess* const server : {&nodes.a(), &nodes.b()}) {
        CHECK(server->metric_becomes("pegaflow_peer_connections", 1));
      }
    }
    nodes.check_use(1);
  }

  TEST_CASE("a node that was restarted unnoticed: its former incarnation is rejected") {
    const Cluster nodes({"--peer-deadline", "2s"});
    Cluster::save(*nodes.on_a, 1);
    nodes.link_of_a().limit_sent(kSlow);
    const std::uint64_t before = nodes.link_of_a().sent_bytes();
    const auto claimed = Cluster::claim(*nodes.on_b, 1);
    nodes.wait_for_bytes(before, 0.05);

    nodes.link_of_a().cut();
    nodes.a().kill();
    nodes.a().start();
    // Other bytes are at the same address under the same page numbers.
    nodes.on_a->engine->wait_ready();
    Cluster::save(*nodes.on_a, 7001);
    nodes.link_of_a().limit_sent("");
    nodes.link_of_a().mend();

    CHECK(Cluster::load(*nodes.on_b, claimed, 1).blocks < kBlocks);
    nodes.check_use(10001);
  }
}

}  // namespace
}  // namespace pegaflow::testing
