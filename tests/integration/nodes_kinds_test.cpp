// Several kinds of blocks at several nodes: real servers, without faults.
#include <csignal>
#include <vector>

#include <doctest/doctest.h>

#include "tests/integration/hybrid_engine.h"
#include "tests/support/nodes.h"

namespace pegaflow::testing {
namespace {

struct TwoNodes {
  std::vector<std::string> at = node_addresses(2);
  ServerProcess a{node_options(at[0], at)};
  ServerProcess b{node_options(at[1], at)};
  kj::AsyncIoContext io = kj::setupAsyncIo();
  HybridEngine on_a{a, io};
  HybridEngine on_b{b, io};
};

TEST_SUITE("nodes, several kinds") {
  TEST_CASE("a reset at one node ends the blocks of all kinds at both") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    REQUIRE(sees(a, at[1]));
    on_a.save_eight(1);
    on_b.save_eight(1);
    REQUIRE(on_a.scheduler.lookup(make_keys(1, 8)).blocks == 8);

    REQUIRE(on_b.scheduler.reset_cache());

    CHECK(b.metric("pegaflow_reset_unconfirmed_nodes_total") == 0);
    CHECK(a.metric("pegaflow_namespace_resets_total{origin=\"peer\"}") == 1);
    CHECK(on_a.scheduler.lookup(make_keys(1, 8)).blocks == 0);
    CHECK(on_b.scheduler.lookup(make_keys(1, 8)).blocks == 0);
    CHECK(a.metric_becomes("pegaflow_cache_resident_blocks", 0));
    // None of the former blocks is part of what is saved from now on.
    on_a.save(kFull, 1, {0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(on_a.scheduler.lookup(make_keys(1, 8)).blocks == 0);
    on_a.save(kWindow, 1, {5, 6, 7});
    on_a.save(kState, 1, {3});
    CHECK(on_a.scheduler.lookup(make_keys(1, 8)).blocks == 8);
  }

  TEST_CASE("full, window and state blocks of one node are read by the other, byte for byte") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    on_a.save_eight(1);

    // A lookup finds them without a claim or a transfer.
    const auto found = on_b.scheduler.lookup(make_keys(1, 9));
    CHECK(found.blocks == 0);
    CHECK(found.elsewhere == 8);
    CHECK(b.metric("pegaflow_fetch_bytes_total") == 0);

    on_b.check_eight_arrive(1);
    CHECK(b.metric("pegaflow_fetch_bytes_total") == (8 + 3 + 2) * kPage);
    CHECK(b.metric("pegaflow_replica_blocks") == 12);
    check_nothing_is_left(b, std::nullopt);
    CHECK(a.metric_becomes("pegaflow_leases", 0));

    // From now on B has its own copies.
    const auto again = on_b.scheduler.lookup(make_keys(1, 8));
    CHECK(again.blocks == 8);
    CHECK(again.elsewhere == 0);
    const Id128 token = Id128::random();
    const auto claimed = on_b.scheduler.claim(token, make_keys(1, 8));
    REQUIRE(claimed);
    CHECK(claimed->blocks == 8);
    CHECK(claimed->elsewhere == 0);
    for (const WireClient::Range& range : claimed->ranges) {
      on_b.check_range(token, range, range.kind + 1);
    }
    CHECK(b.metric("pegaflow_fetch_bytes_total") == (8 + 3 + 2) * kPage);
  }

  TEST_CASE("full, window and state blocks that are only on a disk of one node are read") {
    TemporaryDirectory directory;
    const std::string file = (directory.path() / "cache").string();
    const std::vector<std::string> disk = {
        "--ssd-cache-path",   file,  "--ssd-cache-capacity", "32mb",
        "--ssd-segment-size", "1mb", "--ssd-write-ahead",    "1mb"};
    const std::vector<std::string> at = node_addresses(2);
    const ServerProcess a{node_options(at[0], at, disk, "1mb")};
    const ServerProcess b{node_options(at[1], at)};
    kj::AsyncIoContext io = kj::setupAsyncIo();
    HybridEngine on_a{a, io};
    HybridEngine on_b{b, io};
    REQUIRE(sees(b, at[0]));
    REQUIRE(disk_is_ready(a, file));
    REQUIRE(a.metric_becomes("pegaflow_ssd_waits_for_peers", 0));
    on_a.save_eight(1);
    REQUIRE(a.metric_becomes("pegaflow_ssd_written_blocks_total{disk=\"" + file + "\"}", 12));
    REQUIRE(a.post("/cache/memory/cleanup").status == 200);
    REQUIRE(a.metric_becomes("pegaflow_cache_resident_blocks", 0));

    CHECK(on_b.scheduler.lookup(make_keys(1, 9)).elsewhere == 8);
    on_b.check_eight_arrive(1);
    CHECK(a.metric("pegaflow_ssd_staged_blocks_total") == 12);
    CHECK(b.metric("pegaflow_fetch_pending_blocks_total") == 12);
    check_nothing_is_left(b, std::nullopt);
    CHECK(a.metric_becomes("pegaflow_ssd_staging_bytes", 0));
  }

  TEST_CASE("a node reads only the blocks that it does not have") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    on_a.save_eight(1);
    on_b.save(kFull, 1, {0, 1, 2, 3, 4, 5, 6, 7});
    on_b.save(kWindow, 1, {6});
    on_b.check_eight_arrive(1);
    CHECK(b.metric("pegaflow_fetch_bytes_total") == (2 + 2) * kPage);
  }

  TEST_CASE("a shorter prefix of this node gives way to a longer one of another") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    on_a.save_eight(1);
    on_b.save(kFull, 1, {0, 1, 2, 3});
    on_b.save(kWindow, 1, {1, 2, 3});
    on_b.save(kState, 1, {1});
    const auto found = on_b.scheduler.lookup(make_keys(1, 8));
    CHECK(found.blocks == 4);
    CHECK(found.elsewhere == 4);
    on_b.check_eight_arrive(1);
  }

  TEST_CASE("a boundary whose blocks are divided over two other nodes is not offered") {
    const std::vector<std::string> at = node_addresses(3);
    const ServerProcess a{node_options(at[0], at)};
    const ServerProcess b{node_options(at[1], at)};
    const ServerProcess c{node_options(at[2], at)};
    kj::AsyncIoContext io = kj::setupAsyncIo();
    HybridEngine on_a(a, io);
    HybridEngine on_b(b, io);
    HybridEngine on_c(c, io);
    REQUIRE(sees(c, at[0]));
    REQUIRE(sees(c, at[1]));
    on_a.save(kFull, 1, {0, 1, 2, 3, 4, 5, 6, 7});
    on_a.save(kWindow, 1, {5, 6, 7});
    on_b.save(kState, 1, {3});
    CHECK(on_c.scheduler.lookup(make_keys(1, 8)).elsewhere == 0);
    const auto none = on_c.scheduler.claim(Id128::random(), make_keys(1, 8));
    REQUIRE(none);
    CHECK(none->blocks + none->elsewhere == 0);
    CHECK(none->ranges.empty());

    // With one part here, the others are at one node.
    on_c.save(kState, 1, {3});
    on_c.check_eight_arrive(1);
    CHECK(c.metric("pegaflow_fetch_bytes_total") == (8 + 3) * kPage);
    CHECK(b.metric("pegaflow_lent_bytes_total") == 0);
  }

  TEST_CASE("a claim that ends while another node is asked holds no block") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    on_a.save_eight(1);
    on_b.save(kFull, 1, {0, 1, 2, 3});
    on_b.save(kWindow, 1, {1, 2, 3});
    on_b.save(kState, 1, {1});
    const Id128 token = Id128::random();
    auto request = on_b.scheduler.session().claimRequest();
    write_id(token, request.initToken());
    write_keys(make_keys(1, 8), 32, request.initKeys());

    a.signal(SIGSTOP);  // The engine waits no longer than a few milliseconds.
    auto claiming = request.send();
    REQUIRE(on_b.scheduler.unclaim(token));
    a.signal(SIGCONT);
    const auto claimed = claiming.wait(io.waitScope);

    CHECK_FALSE(claimed.hasError());
    CHECK(claimed.getReady() + claimed.getComing() == 0);
    CHECK(claimed.getRanges().size() == 0);
    check_nothing_is_left(b, std::nullopt);
    on_b.check_eight_arrive(1);
  }

  TEST_CASE("blocks of a namespace that was reset at their node are not found by another") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    REQUIRE(sees(a, at[1]));
    on_a.save_eight(1);
    REQUIRE(on_b.scheduler.lookup(make_keys(1, 8)).elsewhere == 8);
    REQUIRE(on_a.scheduler.reset_cache());
    CHECK(on_b.scheduler.lookup(make_keys(1, 8)).elsewhere == 0);
    on_a.save_eight(1);
    on_b.check_eight_arrive(1);
  }

  TEST_CASE("where no other node has a longer prefix, this node's own is claimed") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    on_b.save_eight(1);
    // Once the other node has nothing, once some of what a longer prefix needs.
    for (const bool has_some : {false, true}) {
      if (has_some) on_a.save(kFull, 1, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
      const Id128 token = Id128::random();
      const auto claimed = on_b.scheduler.claim(token, make_keys(1, 10));
      REQUIRE(claimed);
      CHECK(claimed->complete);
      CHECK(claimed->blocks == 8);
      CHECK(claimed->elsewhere == 0);
      CHECK(claimed->ranges ==
            std::vector<WireClient::Range>{{kFull, 0, 8}, {kWindow, 5, 3}, {kState, 3, 1}});
      for (const WireClient::Range& range : claimed->ranges) {
        on_b.check_range(token, range, range.kind + 1);
      }
      REQUIRE(on_b.scheduler.unclaim(token));
    }
    CHECK(b.metric("pegaflow_fetch_bytes_total") == 0);
    check_nothing_is_left(b, std::nullopt);
  }

  TEST_CASE("behind the engine's own units, another node's blocks are found, claimed and read") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    on_a.save(kFull, 1, {4, 5, 6, 7});
    on_a.save(kWindow, 1, {5, 6, 7});
    on_a.save(kState, 1, {3});
    const auto units = make_keys(1, 8);
    CHECK(on_b.scheduler.lookup(units).elsewhere == 0);
    CHECK(on_b.scheduler.lookup(units, 4).elsewhere == 8);
    const auto none = on_b.scheduler.claim(Id128::random(), units);
    REQUIRE(none);
    CHECK(none->blocks + none->elsewhere == 0);

    const Id128 token = Id128::random();
    const auto claimed = on_b.scheduler.claim(token, units, 4);
    REQUIRE(claimed);
    CHECK(claimed->elsewhere == 8);
    CHECK(claimed->ranges ==
          std::vector<WireClient::Range>{{kFull, 4, 4}, {kWindow, 5, 3}, {kState, 3, 1}});
    for (const WireClient::Range& range : claimed->ranges) {
      CHECK(on_b.check_arriving(token, range, 100 * (range.kind + 1)));
    }
    on_b.release_all(claimed->ranges);
    REQUIRE(on_b.scheduler.unclaim(token));
    check_nothing_is_left(b, std::nullopt);
  }

  TEST_CASE("blocks that the engine has itself are not read from another node") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    on_a.save_eight(1);
    const Id128 token = Id128::random();
    const auto claimed = on_b.scheduler.claim(token, make_keys(1, 8), 6);
    REQUIRE(claimed);
    CHECK(claimed->ranges ==
          std::vector<WireClient::Range>{{kFull, 6, 2}, {kWindow, 5, 3}, {kState, 3, 1}});
    for (const WireClient::Range& range : claimed->ranges) {
      CHECK(on_b.check_arriving(token, range, 100 * (range.kind + 1)));
    }
    on_b.release_all(claimed->ranges);
    REQUIRE(on_b.scheduler.unclaim(token));
    check_nothing_is_left(b, std::nullopt);
    CHECK(b.metric("pegaflow_fetch_bytes_total") == (2 + 3 + 2) * kPage);
  }

  TEST_CASE("a reset while blocks are awaited ends the load, and the old bytes are not kept") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    REQUIRE(sees(a, at[1]));
    on_a.save_eight(1);
    const Id128 token = Id128::random();
    const auto claimed = on_b.scheduler.claim(token, make_keys(1, 8));
    REQUIRE(claimed);
    REQUIRE(claimed->elsewhere == 8);
    REQUIRE(on_a.scheduler.reset_cache());
    for (const WireClient::Range& range : claimed->ranges) {
      CHECK_FALSE(on_b.check_arriving(token, range, 100 * (range.kind + 1)));
    }
    REQUIRE(on_b.scheduler.unclaim(token));
    CHECK(on_b.scheduler.lookup(make_keys(1, 8)).blocks == 0);
    check_nothing_is_left(b, std::nullopt);
  }

  TEST_CASE(
      "the node dies while blocks are awaited: each arrives with its bytes, or its open fails") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    on_a.save_eight(1);
    const Id128 token = Id128::random();
    const auto claimed = on_b.scheduler.claim(token, make_keys(1, 8));
    REQUIRE(claimed);
    REQUIRE(claimed->elsewhere == 8);
    a.kill();
    std::size_t arrived = 0;
    for (const WireClient::Range& range : claimed->ranges) {
      arrived += on_b.check_arriving(token, range, 100 * (range.kind + 1)) ? 1 : 0;
    }
    // What has arrived is found from now on; a prompt that lacks a block of any kind is not.
    on_b.release_all(claimed->ranges);
    REQUIRE(on_b.scheduler.unclaim(token));
    const std::uint32_t left = on_b.scheduler.lookup(make_keys(1, 8)).blocks;
    CHECK(left == (arrived == claimed->ranges.size() ? 8 : 0));
    check_nothing_is_left(b, std::nullopt);
  }
}

}  // namespace
}  // namespace pegaflow::testing
