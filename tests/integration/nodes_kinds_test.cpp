// Several kinds of blocks at several nodes: real servers, without faults.
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

  TEST_CASE("lookups and claims of several kinds find the blocks of their own node") {
    TwoNodes two;
    auto& [at, a, b, io, on_a, on_b] = two;
    REQUIRE(sees(b, at[0]));
    on_a.save_eight(1);
    CHECK(on_b.scheduler.lookup(make_keys(1, 8)).blocks == 0);
    CHECK(on_b.scheduler.claim(Id128::random(), make_keys(1, 8))->blocks == 0);
    on_b.save_eight(1);
    const Id128 token = Id128::random();
    const auto claimed = on_b.scheduler.claim(token, make_keys(1, 8));
    REQUIRE(claimed);
    CHECK(claimed->blocks == 8);
    for (const WireClient::Range& range : claimed->ranges) {
      on_b.check_range(token, range, range.kind + 1);
    }
    CHECK(b.metric("pegaflow_fetch_bytes_total") == 0);
  }
}

}  // namespace
}  // namespace pegaflow::testing
