// Servers that know each other only by the directory, with real Redis servers: blocks are found and
// read, and whatever happens to the directory, every claim is answered.
#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include <sys/stat.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "harness/redis_process.h"
#include "tests/support/nodes.h"

namespace pegaflow::testing {
namespace {

using harness::RedisProcess;

constexpr std::size_t kPiece = std::size_t{8} << 10;
constexpr std::size_t kBlocks = 600;  // Some 19 anchors.

RedisProcess redis() {
  auto started = RedisProcess::start({.address = node_addresses(1)[0]});
  REQUIRE_MESSAGE(started, (started ? std::string() : started.error().detail));
  return std::move(*started);
}

/// The secret of the nodes, in a file.
struct Secret {
  Secret() {
    std::ofstream(path()) << "0123456789abcdef0123456789abcdef\n";
    ::chmod(path().c_str(), 0600);
  }
  [[nodiscard]] std::string path() const { return directory.path() / "peers.secret"; }
  TemporaryDirectory directory;
};

ServerProcess::Options options_of(const std::string& address, const std::string& urls,
                                  const Secret& secret,
                                  const std::string& networks = "127.0.0.0/8") {
  ServerProcess::Options options{.pool_size = "64mb"};
  options.arguments = {
      "--directory",     urls,     "--peer-listen",   address, "--peer-secret-file", secret.path(),
      "--peer-networks", networks, "--peer-deadline", "5s",    "--fetch-deadline",   "8s",
      "--nics",          "none"};
  return options;
}

/// Two nodes in one directory.
struct TwoNodes {
  std::vector<std::string> at = node_addresses(2);
  RedisProcess directory = redis();
  Secret secret;
  ServerProcess a{options_of(at[0], directory.url(), secret)};
  ServerProcess b{options_of(at[1], directory.url(), secret)};
  EngineAt on_a{a, kPiece, kBlocks};
  EngineAt on_b{b, kPiece, kBlocks};

  /// Saves blocks at A and waits until it has announced them.
  void save_at_a(std::uint64_t first) {
    const double before = a.metric("pegaflow_directory_anchors");
    REQUIRE_FALSE(on_a.engine->save(numbers_from(first, kBlocks), blocks_from(0, kBlocks)).error);
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (a.metric("pegaflow_directory_anchors") <= before ||
           a.metric("pegaflow_directory_pending_writes") != 0) {
      REQUIRE(std::chrono::steady_clock::now() < end);
    }
  }
  /// Whether B comes to find the blocks at A.
  [[nodiscard]] bool finds_at_b(std::uint64_t first) const {
    const auto end = std::chrono::steady_clock::now() + kHang;
    while (std::chrono::steady_clock::now() < end) {
      if (on_b.engine->lookup(numbers_from(first, kBlocks)).value().blocks == kBlocks) return true;
    }
    return false;
  }
};

TEST_SUITE("directory_nodes") {
  TEST_CASE("a node reads blocks of a node that only the directory names") {
    TwoNodes two;
    REQUIRE(two.b.metric_becomes("pegaflow_directory_nodes", 2));
    two.save_at_a(1000);
    REQUIRE(two.finds_at_b(1000));
    CHECK(two.b.metric("pegaflow_directory_ready_links") == 1);

    const auto claimed = two.on_b.engine->claim(numbers_from(1000, kBlocks)).value();
    CHECK(claimed.blocks > 0);
    const Mover::Finished loaded = two.on_b.load_and_check(claimed, 1000);
    CHECK(loaded.failed_blocks.empty());
    CHECK(two.b.metric("pegaflow_fetch_bytes_total") > 0);
    const auto health = nlohmann::json::parse(two.b.get("/health").body);
    CHECK(health["nodes"]["directory"]["usable"] == true);
    CHECK(health["nodes"]["directory"]["servers"][0]["state"] == "ready");
  }

  TEST_CASE("every claim is answered while the directory is away, and blocks are found again") {
    TwoNodes two;
    REQUIRE(two.b.metric_becomes("pegaflow_directory_nodes", 2));
    two.save_at_a(1000);
    REQUIRE(two.finds_at_b(1000));

    SUBCASE("killed") { two.directory.process().kill(); }
    SUBCASE("stopped") { REQUIRE(two.directory.process().signal(SIGSTOP)); }
    SUBCASE("flushed") { REQUIRE(two.directory.call({"FLUSHALL"})); }
    // The link that is there serves meanwhile.
    for (int i = 0; i < 50; ++i) {
      CHECK(two.on_b.engine->lookup(numbers_from(5000 + 1000 * i, 100)).value().blocks == 0);
    }
    CHECK(two.finds_at_b(1000));
    if (!two.directory.process().running()) {
      REQUIRE(two.directory.restart());
    } else {
      REQUIRE(two.directory.process().signal(SIGCONT));
    }

    REQUIRE(two.b.metric_becomes("pegaflow_directory_usable", 1));
    REQUIRE(two.a.metric_becomes("pegaflow_directory_usable", 1));
    // A third node has no link yet, so that it finds by the directory or not at all.
    const std::string at = node_addresses(1)[0];
    const ServerProcess c(options_of(at, two.directory.url(), two.secret));
    const EngineAt on_c(c, kPiece, kBlocks);
    const auto end = std::chrono::steady_clock::now() + kHang;
    std::size_t found = 0;
    while (found != kBlocks && std::chrono::steady_clock::now() < end) {
      found = on_c.engine->lookup(numbers_from(1000, kBlocks)).value().blocks;
    }
    CHECK(found == kBlocks);
  }

  TEST_CASE("a node outside the configured networks is not dialed") {
    const auto at = node_addresses(2);
    const RedisProcess directory = redis();
    const Secret secret;
    const ServerProcess a(options_of(at[0], directory.url(), secret));
    const ServerProcess b(options_of(at[1], directory.url(), secret, "10.0.0.0/8"));
    const EngineAt on_a(a, kPiece, kBlocks);
    const EngineAt on_b(b, kPiece, kBlocks);
    REQUIRE(b.metric_becomes("pegaflow_directory_nodes", 2));
    REQUIRE_FALSE(on_a.engine->save(numbers_from(1, kBlocks), blocks_from(0, kBlocks)).error);

    const auto end = std::chrono::steady_clock::now() + kHang;
    while (b.metric("pegaflow_directory_ignored_total{reason=\"network\"}") == 0 &&
           std::chrono::steady_clock::now() < end) {
      CHECK(on_b.engine->lookup(numbers_from(1, kBlocks)).value().blocks == 0);
    }
    CHECK(b.metric("pegaflow_directory_ignored_total{reason=\"network\"}") > 0);
    CHECK(b.metric("pegaflow_directory_dials_total{result=\"dialed\"}") == 0);
    CHECK(a.metric("pegaflow_peer_connections") == 0);
  }

  TEST_CASE("a reset reaches a node without a link") {
    TwoNodes two;
    REQUIRE(two.b.metric_becomes("pegaflow_directory_nodes", 2));
    two.save_at_a(1000);
    REQUIRE(two.on_a.engine->lookup(numbers_from(1000, kBlocks)).value().blocks == kBlocks);
    REQUIRE(two.b.metric("pegaflow_directory_ready_links") == 0);

    REQUIRE(two.on_b.engine->session().reset_cache(kHang));
    const auto end = std::chrono::steady_clock::now() + kHang;
    std::size_t found = kBlocks;
    while (found != 0 && std::chrono::steady_clock::now() < end) {
      found = two.on_a.engine->lookup(numbers_from(1000, kBlocks)).value().blocks;
    }
    CHECK(found == 0);
    CHECK(two.a.metric_becomes("pegaflow_directory_epochs_learned_total", 1));
  }

  TEST_CASE("options that make no sense are rejected with what is missing") {
    const auto refused = [](std::vector<std::string> arguments) {
      ServerProcess::Options options{.arguments = std::move(arguments), .wait_until_ready = false};
      ServerProcess server(std::move(options));
      CHECK(server.wait_for_exit() != 0);
      return server.log();
    };
    const Secret secret;
    const std::string at = node_addresses(1)[0];
    const auto has = [](const std::string& log, const std::string& text) {
      return log.find(text) != std::string::npos;
    };
    CHECK(has(refused({"--directory", "redis://h", "--peer-listen", at}), "--peer-secret-file"));
    CHECK(has(refused({"--directory", "redis://h", "--peer-listen", at, "--peer-secret-file",
                       secret.path()}),
              "--peer-networks"));
    CHECK(has(refused({"--directory", "http://h", "--peer-listen", at, "--peer-secret-file",
                       secret.path(), "--peer-networks", "127.0.0.0/8"}),
              "redis://"));
    CHECK(has(refused({"--directory", "redis://h", "--peer-listen", at, "--peer-secret-file",
                       secret.path(), "--peer-networks", "127.0.0.1/8"}),
              "bits behind the first 8"));
    CHECK(has(refused({"--directory", "redis://h"}), "--peers or --peer-listen"));
    CHECK(has(refused({"--directory", "redis://h,redis://user@h:6379", "--peer-listen", at,
                       "--peer-secret-file", secret.path(), "--peer-networks", "127.0.0.0/8"}),
              "redis://h:6379/0 is named twice"));
  }
}

}  // namespace
}  // namespace pegaflow::testing
