// Nodes that die, hang, lie or do not know the secret while others read from them. In every case:
// loaded bytes are right, wrong ones are reported so, and all resources are returned.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <capnp/rpc-twoparty.h>
#include <doctest/doctest.h>
#include <kj/async-io.h>

#include "base/os/unique_fd.h"
#include "capnp/peer.capnp.h"
#include "tests/support/nodes.h"
#include "tests/support/seed.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = std::size_t{256} << 10;
constexpr std::size_t kBlocks = 96;  // 48 MiB: some tens of milliseconds in flight.

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Two nodes; B reads blocks of A.
struct Pair {
  explicit Pair(std::vector<std::string> more_of_b = {}, std::vector<std::string> more_of_a = {})
      : a(node_options(at[0], {at[0]}, std::move(more_of_a), "256mb")),
        b(node_options(at[1], {at[0]}, std::move(more_of_b), "256mb")),
        on_b(b, kPiece, kBlocks) {}

  void save_at_a(std::uint64_t first) {
    EngineAt on_a(a, kPiece, kBlocks);
    REQUIRE(on_a.engine->save(numbers_from(first, kBlocks), blocks_from(0, kBlocks)).blocks ==
            kBlocks);
  }
  /// Loads a claim at B: every block is right, or named as failed.
  Mover::Finished load_and_check(const CacheSession::Answer& claimed, std::uint64_t first) {
    return on_b.load_and_check(claimed, first);
  }
  /// No state of a fetch is left.
  void check_rest() { check_nothing_is_left(b, 0); }

  std::vector<std::string> at = node_addresses(2);
  ServerProcess a;
  ServerProcess b;
  EngineAt on_b;
};

TEST_SUITE("nodes that fail") {
  TEST_CASE("a node is killed in the middle of a pull, and restarts under its name") {
    Pair pair;
    for (std::uint64_t round = 0; round < 3; ++round) {
      const std::uint64_t first = 1 + 1000 * round;
      REQUIRE(sees(pair.b, pair.at[0]));
      pair.save_at_a(first);

      const auto claimed = pair.on_b.engine->claim(numbers_from(first, kBlocks)).value();
      pair.a.kill();
      CHECK(claimed.blocks > 0);
      pair.load_and_check(claimed, first);
      CHECK(sees_no_more(pair.b, pair.at[0]));
      pair.check_rest();
      pair.a.start();
    }
    // Then B reads from it again.
    REQUIRE(sees(pair.b, pair.at[0]));
    pair.save_at_a(9001);
    const auto claimed = pair.on_b.engine->claim(numbers_from(9001, kBlocks)).value();
    CHECK(pair.load_and_check(claimed, 9001).blocks == claimed.blocks);
  }

  TEST_CASE("a node is stopped in the middle of a pull, and continues") {
    Pair pair({"--peer-deadline", "100ms", "--fetch-deadline", "2s"});
    REQUIRE(sees(pair.b, pair.at[0]));
    pair.save_at_a(1);

    const auto claimed = pair.on_b.engine->claim(numbers_from(1, kBlocks)).value();
    pair.a.signal(SIGSTOP);
    pair.load_and_check(claimed, 1);
    // A few requests detect it; afterwards no call waits for it.
    for (int i = 0; i < 4; ++i) {
      CHECK(pair.on_b.engine->lookup(numbers_from(5001, 4)).value().blocks == 0);
    }
    CHECK(sees_no_more(pair.b, pair.at[0]));
    pair.check_rest();
    pair.a.signal(SIGCONT);

    REQUIRE(sees(pair.b, pair.at[0]));
    pair.save_at_a(7001);
    const auto again = pair.on_b.engine->claim(numbers_from(7001, kBlocks)).value();
    CHECK(again.blocks == kBlocks);
    pair.load_and_check(again, 7001);
  }

  TEST_CASE("an owner that stops for a moment is not lost, nor are the bytes from it") {
    constexpr std::size_t kHalfMiB = std::size_t{512} << 10;
    const auto at = node_addresses(2);
    const ServerProcess a(node_options(at[0], {at[0]}, {}, "512mb"));
    const ServerProcess b(node_options(at[1], {at[0]}, {"--peer-deadline", "300ms"}, "512mb"));
    EngineAt on_a(a, kHalfMiB, kBlocks);
    EngineAt on_b(b, kHalfMiB, kBlocks);
    REQUIRE(sees(b, at[0]));
    const auto of_a = [&](const char* name) {
      return b.metric(fmt::format("pegaflow_peer_{}_total{{peer=\"{}\"}}", name, at[0]));
    };
    for (std::uint64_t round = 0; round < 3; ++round) {
      const std::uint64_t first = 1 + 1000 * round;
      REQUIRE(on_a.engine->save(numbers_from(first, kBlocks), blocks_from(0, kBlocks)).blocks ==
              kBlocks);
      const auto claimed = on_b.engine->claim(numbers_from(first, kBlocks)).value();
      REQUIRE(claimed.blocks == kBlocks);

      // More requests at once than may be missed in a row.
      a.signal(SIGSTOP);
      std::vector<CacheSession::Ticket> lookups;
      for (std::uint64_t i = 0; i < 4; ++i) {
        const auto keys = numbered_keys(numbers_from(500001 + 10 * i, 4));
        lookups.push_back(on_b.engine->session().lookup(keys).value());
      }
      for (const auto ticket : lookups) {
        const auto answer = on_b.engine->session().take(ticket, kHang);
        REQUIRE(answer);
        CHECK(answer->value().blocks == 0);
      }
      CHECK(of_a("late") == 4 * static_cast<double>(round + 1));
      a.signal(SIGCONT);

      CHECK(on_b.load_and_check(claimed, first).blocks == kBlocks);
      // It responded late, and receives requests again.
      CHECK(b.metric_becomes("pegaflow_fetch_batches", 0));
    }
    CHECK(of_a("losses") == 0);
    CHECK(of_a("greetings") == 1);
    CHECK(a.metric_becomes("pegaflow_leases", 0));
    CHECK(a.metric("pegaflow_leases_total{result=\"ran_out\"}") == 0);
    check_nothing_is_left(a, 1);
  }

  TEST_CASE("an owner that stops for 20 ms costs no block and no peer, with default deadlines") {
    constexpr std::chrono::milliseconds kStop{20};
    constexpr std::uint64_t kRounds = 10;
    Pair pair;
    REQUIRE(sees(pair.b, pair.at[0]));
    const auto of_a = [&](const char* name) {
      return pair.b.metric(fmt::format("pegaflow_peer_{}_total{{peer=\"{}\"}}", name, pair.at[0]));
    };
    std::uint64_t whole = 0;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const std::uint64_t first = 1 + 1000 * round;
      pair.save_at_a(first);
      // On a busy machine A may be late by itself: this test is about the pause.
      auto claimed = pair.on_b.engine->claim(numbers_from(first, kBlocks)).value();
      while (claimed.blocks != kBlocks) {
        if (claimed.blocks != 0) pair.load_and_check(claimed, first);
        claimed = pair.on_b.engine->claim(numbers_from(first, kBlocks)).value();
      }

      pair.a.signal(SIGSTOP);
      const auto stopped = std::chrono::steady_clock::now();
      std::vector<CacheSession::Ticket> lookups;
      for (std::uint64_t i = 0; i < 4; ++i) {
        const auto keys = numbered_keys(numbers_from(500001 + 100 * round + 10 * i, 4));
        lookups.push_back(pair.on_b.engine->session().lookup(keys).value());
      }
      std::this_thread::sleep_until(stopped + kStop);
      pair.a.signal(SIGCONT);

      whole += pair.load_and_check(claimed, first).blocks == kBlocks ? 1 : 0;
      for (const auto ticket : lookups) {
        REQUIRE(pair.on_b.engine->session().take(ticket, kHang));
      }
    }
    CHECK(whole == kRounds);
    CHECK(of_a("losses") == 0);
    CHECK(of_a("greetings") == 1);
    pair.check_rest();
  }

  TEST_CASE("blocks that one owner no longer lends are read from another") {
    const auto at = node_addresses(3);
    ServerProcess a(node_options(at[0], {}, {}, "256mb"));
    const ServerProcess c(node_options(at[1], {}, {}, "256mb"));
    const ServerProcess b(node_options(at[2], {at[0], at[1]}, {}, "256mb"));
    EngineAt on_b(b, kPiece, kBlocks);
    for (const ServerProcess* owner : {static_cast<const ServerProcess*>(&a), &c}) {
      EngineAt engine(*owner, kPiece, kBlocks);
      REQUIRE(engine.engine->save(numbers_from(1, kBlocks), blocks_from(0, kBlocks)).blocks ==
              kBlocks);
    }
    REQUIRE(sees(b, at[0]));
    REQUIRE(sees(b, at[1]));

    // Equal owners: the first in the list is read from, and dies.
    const auto claimed = on_b.engine->claim(numbers_from(1, kBlocks)).value();
    CHECK(claimed.blocks == kBlocks);
    a.kill();
    const Mover::Finished loaded = on_b.engine->load(claimed.token, blocks_from(0, kBlocks));

    CHECK(loaded.blocks == kBlocks);
    CHECK(on_b.engine->wrong_blocks(numbers_from(1, kBlocks), blocks_from(0, kBlocks)) == 0);
    CHECK(b.metric("pegaflow_fetch_blocks_total{result=\"given_up\"}") == 0);
  }

  TEST_CASE("an owner evicts as fast as it can while it is read from") {
    Pair pair;
    REQUIRE(sees(pair.b, pair.at[0]));
    pair.save_at_a(1);
    EngineAt on_a(pair.a, kPiece, kBlocks);

    const auto claimed = pair.on_b.engine->claim(numbers_from(1, kBlocks)).value();
    std::vector<std::uint64_t> jobs;
    for (std::uint64_t job = 1; job <= 8; ++job) {
      on_a.engine->save(numbers_from(100000 * job, kBlocks), blocks_from(0, kBlocks));
    }
    CHECK(pair.load_and_check(claimed, 1).blocks > 0);
    CHECK(pair.a.metric("pegaflow_cache_block_evictions_total") > 0);
    pair.check_rest();
  }

  TEST_CASE("a reader that dies leaves nothing lent for longer than its lease") {
    Pair pair;
    REQUIRE(sees(pair.b, pair.at[0]));
    pair.save_at_a(1);

    // Its claim returns when the lease exists, long before all bytes have arrived.
    REQUIRE(pair.on_b.engine->claim(numbers_from(1, kBlocks)).value().blocks > 0);
    pair.b.kill();

    CHECK(pair.a.metric_becomes("pegaflow_leases", 0));
    CHECK(pair.a.metric_becomes("pegaflow_lent_bytes", 0));
    CHECK(pair.a.metric_becomes("pegaflow_held_blocks", 0));
  }

  TEST_CASE("the engine that waits for blocks dies: they arrive, and no state is kept for it") {
    Pair pair;
    REQUIRE(sees(pair.b, pair.at[0]));
    pair.save_at_a(1);
    REQUIRE(pair.on_b.engine->claim(numbers_from(1, kBlocks)).value().blocks > 0);

    pair.on_b.engine->close_session();

    pair.check_rest();
    CHECK(pair.a.metric_becomes("pegaflow_leases", 0));
  }

  TEST_CASE("another secret: both nodes report only that, once") {
    const auto at = node_addresses(2);
    const TemporaryDirectory directory;
    const std::string ours = secret_file(directory.path(), "ours, and of no other");
    const std::string other = secret_file(directory.path(), "other nodes have this one");
    const ServerProcess a(node_options(at[0], {}, {"--peer-secret-file", ours}));
    const ServerProcess b(node_options(at[1], {at[0]}, {"--peer-secret-file", other}));
    const ServerProcess c(
        node_options(at[1], {at[0]}, {"--peer-listen", "127.0.0.1:0", "--peer-secret-file", ours}));
    const std::string refusals = fmt::format("pegaflow_peer_refusals_total{{peer=\"{}\"}}", at[0]);
    REQUIRE(sees(c, at[0]));
    CHECK(b.metric_becomes(refusals, 2));

    CHECK(b.metric(fmt::format("pegaflow_peer_ready{{peer=\"{}\"}}", at[0])) == 0);
    CHECK(a.metric("pegaflow_peer_entered_total") == 1);
    const std::string log = b.log();
    CHECK(has(log, "another --peer-secret-file"));
    const std::string rejected = "peer rejected: fix the configuration";
    REQUIRE(has(log, rejected));
    CHECK(log.find(rejected) == log.rfind(rejected));  // Once, however often it is dialed.
  }

  TEST_CASE("the secret is replaced on three nodes while they read from each other") {
    const std::string former = "the former secret, of 32 bytes or more";
    const std::string coming = "a new secret, also of 32 bytes or more";
    const auto at = node_addresses(3);
    const TemporaryDirectory directory;
    const auto file_of = [&](std::size_t node) {
      return (directory.path() / fmt::format("secret-{}", node)).string();
    };
    // A new file that is renamed over the former one, as the documentation requires.
    const auto write = [](const std::string& path, const std::string& text) {
      std::ofstream(path + ".new") << text << '\n';
      ::chmod((path + ".new").c_str(), 0600);
      std::filesystem::rename(path + ".new", path);
    };
    std::vector<std::unique_ptr<ServerProcess>> nodes;
    std::vector<std::unique_ptr<EngineAt>> engines;
    for (std::size_t i = 0; i < 3; ++i) {
      write(file_of(i), former);
      nodes.push_back(std::make_unique<ServerProcess>(
          node_options(at[i], at, {"--peer-secret-file", file_of(i)})));
    }
    for (const auto& node : nodes) engines.push_back(std::make_unique<EngineAt>(*node, 8192, 16));
    std::uint64_t next = 1;
    const auto check_traffic = [&]() {
      for (std::size_t i = 0; i < 3; ++i) {
        const std::uint64_t first = std::exchange(next, next + 100);
        REQUIRE(engines[i]->engine->save(numbers_from(first, 16), blocks_from(0, 16)).blocks == 16);
        for (std::size_t j = 0; j < 3; ++j) {
          if (i == j) continue;
          const auto claimed = engines[j]->engine->claim(numbers_from(first, 16)).value();
          CHECK(claimed.blocks == 16);
          CHECK(engines[j]->load_and_check(claimed, first).blocks == 16);
        }
      }
    };
    /// Another node with that file greets all of them, whichever version each has read by now.
    const auto check_greetings = [&](const std::string& text) {
      const std::string path = (directory.path() / "newcomer").string();
      write(path, text);
      auto options = node_options("127.0.0.1:0", at, {"--peer-secret-file", path}, "16mb");
      const ServerProcess newcomer(std::move(options));
      for (const std::string& address : at) CHECK(sees(newcomer, address));
    };
    for (const auto& node : nodes) {
      for (const std::string& address : at) {
        if (address != at[static_cast<std::size_t>(&node - nodes.data())]) {
          REQUIRE(sees(*node, address));
        }
      }
    }

    const std::vector<std::string> steps = {former + "\n\n" + coming, coming + "\n\n" + former,
                                            coming};
    std::string before = former;
    for (std::size_t step = 0; step < steps.size(); ++step) {
      for (std::size_t i = 0; i < 3; ++i) {
        write(file_of(i), steps[step]);
        CHECK(nodes[i]->metric_becomes("pegaflow_peer_secret_reloads_total{result=\"used\"}",
                                       static_cast<double>(step + 1)));
        check_traffic();
        if (i != 0) continue;
        // One node is ahead: all admit new nodes of either step.
        check_greetings(before);
        check_greetings(steps[step]);
      }
      before = steps[step];
    }

    for (const auto& node : nodes) {
      CHECK(node->metric("pegaflow_peer_secrets") == 1);
      CHECK(node->metric("pegaflow_peer_refused_total{reason=\"secret\"}") == 0);
      for (const std::string& address : at) {
        CHECK(node->metric(fmt::format("pegaflow_peer_losses_total{{peer=\"{}\"}}", address)) == 0);
      }
      check_nothing_is_left(*node, 2);
    }

    // An invalid file changes nothing, and is reported once.
    write(file_of(0), "short");
    CHECK(nodes[0]->metric_becomes("pegaflow_peer_secret_file_valid", 0));
    check_greetings(coming);
    CHECK(nodes[0]->metric("pegaflow_peer_secret_reloads_total{result=\"rejected\"}") == 1);
    const std::string log = nodes[0]->log();
    CHECK(has(log, "the former secrets stay"));
    CHECK(log.find("the former secrets stay") == log.rfind("the former secrets stay"));
    write(file_of(0), coming);
    CHECK(nodes[0]->metric_becomes("pegaflow_peer_secret_file_valid", 1));
  }

  TEST_CASE("strangers do not fill the log: one line covers many of them") {
    const auto at = node_addresses(1);
    const ServerProcess a(node_options(at[0], {}));
    const auto address = tcp::SocketAddress::parse(at[0]).value();
    for (int i = 0; i < 200; ++i) {
      const UniqueFd stranger(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
      REQUIRE(::connect(stranger.get(), address.data(), address.size()) == 0);
      constexpr std::string_view kRequest = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
      (void)::send(stranger.get(), kRequest.data(), kRequest.size(), MSG_NOSIGNAL);
    }
    CHECK(a.metric_becomes("pegaflow_peer_connections_closed_total{reason=\"protocol\"}", 200));

    std::istringstream log(a.log());
    std::size_t lines = 0;
    for (std::string line; std::getline(log, line);)
      lines += has(line, "connection closed") ? 1 : 0;
    CHECK(lines >= 1);
    CHECK(lines <= 20);  // One in ten seconds, on a machine that is very slow.
  }

  TEST_CASE("a stranger receives versions and a challenge, and nothing else") {
    const auto at = node_addresses(1);
    const TemporaryDirectory directory;
    const std::string secret = secret_file(directory.path(), "ours, and of no other");
    const ServerProcess a(node_options(at[0], {}, {"--peer-secret-file", secret}));
    auto io = kj::setupAsyncIo();
    const auto dial = [&]() {
      return io.provider->getNetwork()
          .parseAddress(at[0].c_str())
          .wait(io.waitScope)
          ->connect()
          .wait(io.waitScope);
    };
    const std::array<kj::byte, 32> challenge{1, 2, 3};
    const auto greet = [&](wire::PeerGate::Client& gate, std::uint16_t version) {
      auto request = gate.greetRequest();
      request.setMinimum(version);
      request.setMaximum(version);
      request.setChallenge(kj::arrayPtr(challenge.data(), challenge.size()));
      return request.send().wait(io.waitScope);
    };
    const auto enter = [&](wire::PeerGate::Client& gate) {
      auto request = gate.enterRequest();
      request.setProof(kj::arrayPtr(challenge.data(), challenge.size()));
      return request.send().wait(io.waitScope);
    };
    {
      auto stream = dial();
      capnp::TwoPartyClient client(*stream);
      auto gate = client.bootstrap().castAs<wire::PeerGate>();
      const auto old = greet(gate, 0);
      CHECK(old.getVersion() == 0);
      CHECK(has(old.getRefused().getDetail().cStr(), "upgrade the peer"));
      const auto late = greet(gate, 9999);
      CHECK(late.getVersion() == 0);
      CHECK(has(late.getRefused().getDetail().cStr(), "upgrade this node"));
    }
    {
      auto stream = dial();
      capnp::TwoPartyClient client(*stream);
      auto gate = client.bootstrap().castAs<wire::PeerGate>();
      CHECK_FALSE(enter(gate).hasPeer());  // Before a greeting.
    }
    {
      auto stream = dial();
      capnp::TwoPartyClient client(*stream);
      auto gate = client.bootstrap().castAs<wire::PeerGate>();
      CHECK(greet(gate, 1).getVersion() == 1);
      const auto refused = enter(gate);
      CHECK_FALSE(refused.hasPeer());
      CHECK_FALSE(refused.hasFabric());
      CHECK(has(refused.getRefused().getDetail().cStr(), "--peer-secret-file"));
      CHECK_FALSE(enter(gate).hasPeer());  // One attempt for each connection.
      CHECK(greet(gate, 1).getVersion() == 0);
    }
    CHECK(a.metric("pegaflow_peer_refused_total{reason=\"version\"}") == 2);
    CHECK(a.metric("pegaflow_peer_refused_total{reason=\"secret\"}") == 3);
    CHECK(a.metric("pegaflow_peer_entered_total") == 0);
  }

  TEST_CASE("invalid bytes cost only their connection") {
    Pair pair;
    REQUIRE(sees(pair.b, pair.at[0]));
    pair.save_at_a(1);
    const std::uint64_t chosen = seed();
    INFO("seed ", chosen);
    std::mt19937_64 chance(chosen);
    const auto address = tcp::SocketAddress::parse(pair.at[0]).value();
    for (int i = 0; i < 64; ++i) {
      const UniqueFd stranger(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
      REQUIRE(::connect(stranger.get(), address.data(), address.size()) == 0);
      std::string noise(chance() % 4096, '\0');
      for (char& byte : noise) byte = static_cast<char>(chance());
      // Half of them look like a message with a few segments.
      if (i % 2 == 0 && noise.size() > 8) {
        const std::uint32_t begin[2] = {static_cast<std::uint32_t>(chance() % 3),
                                        static_cast<std::uint32_t>(chance() % 512)};
        std::memcpy(noise.data(), begin, sizeof begin);
      }
      (void)::send(stranger.get(), noise.data(), noise.size(), MSG_NOSIGNAL);
    }

    CHECK(pair.a.metric_becomes("pegaflow_peer_connections", 1));
    const auto claimed = pair.on_b.engine->claim(numbers_from(1, kBlocks)).value();
    CHECK(pair.load_and_check(claimed, 1).blocks == kBlocks);
  }
}

}  // namespace
}  // namespace pegaflow::testing
