// An engine whose blocks are of several kinds, at a real server.
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/integration/hybrid_engine.h"

namespace pegaflow::testing {
namespace {

/// A server with one engine.
struct OneServer {
  ServerProcess server;
  kj::AsyncIoContext loop = kj::setupAsyncIo();
};
struct Engine : OneServer, HybridEngine {
  Engine() : HybridEngine(server, loop) {}
};

Errc code_of(const auto& result) {
  REQUIRE_FALSE(result.has_value());
  return result.error().code;
}

TEST_SUITE("several kinds") {
  TEST_CASE("a server announces that it knows several kinds") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient client(io, server.socket());
    auto request = client.gate().helloRequest();
    request.setMinimum(kWireMinimum);
    request.setMaximum(kWireMaximum);
    request.setFeatures(kFeatures);
    write_id(Id128::random(), request.initProcess());
    auto answer = request.send().wait(io.waitScope);
    CHECK((answer.getFeatures() & kFeatureKinds) != 0);
    CHECK((answer.getFeatures() & kFeatureNotices) != 0);
  }

  TEST_CASE("the blocks of every kind are found, claimed and loaded, each with its own bytes") {
    Engine engine;
    engine.save_eight(1);
    const auto units = make_keys(1, 10);
    CHECK(engine.scheduler.lookup(units).blocks == 8);
    CHECK(engine.scheduler.lookup(units).complete);
    CHECK(engine.scheduler.lookup(make_keys(2, 10)).blocks == 0);
    const Id128 token = Id128::random();
    const auto claimed = engine.scheduler.claim(token, units);
    REQUIRE(claimed);
    CHECK(claimed->blocks == 8);
    CHECK(claimed->complete);
    CHECK(claimed->ranges ==
          std::vector<WireClient::Range>{{kFull, 0, 8}, {kWindow, 5, 3}, {kState, 3, 1}});
    for (const WireClient::Range& range : claimed->ranges) {
      engine.check_range(token, range, range.kind + 1);
    }
    CHECK(engine.server.metric("pegaflow_claims") == 3);
    REQUIRE(engine.scheduler.unclaim(token));
    CHECK(engine.server.metric("pegaflow_claims") == 0);
    CHECK(engine.server.metric("pegaflow_pins") == 0);
  }

  TEST_CASE("a block of one kind is not found as one of another with the same key") {
    Engine engine;
    engine.save(kState, 1, {0});
    CHECK(engine.scheduler.lookup(make_keys(1, 2)).blocks == 0);
    engine.save(kFull, 1, {0, 1});
    engine.save(kWindow, 1, {0, 1});
    CHECK(engine.scheduler.lookup(make_keys(1, 2)).blocks == 2);
    CHECK(engine.server.metric("pegaflow_cache_resident_blocks") == 5);
    const Id128 token = Id128::random();
    const auto claimed = engine.scheduler.claim(token, make_keys(1, 2));
    REQUIRE(claimed);
    for (const WireClient::Range& range : claimed->ranges) {
      engine.check_range(token, range, range.kind + 1);
    }
  }

  TEST_CASE("the engine's own units are not claimed, and its windows and states are") {
    Engine engine;
    engine.save(kFull, 1, {4, 5, 6, 7});
    engine.save(kWindow, 1, {5, 6, 7});
    engine.save(kState, 1, {3});
    const auto units = make_keys(1, 8);
    CHECK(engine.scheduler.lookup(units).blocks == 0);
    CHECK(engine.scheduler.lookup(units, 4).blocks == 8);
    const Id128 token = Id128::random();
    const auto claimed = engine.scheduler.claim(token, units, 4);
    REQUIRE(claimed);
    CHECK(claimed->ranges ==
          std::vector<WireClient::Range>{{kFull, 4, 4}, {kWindow, 5, 3}, {kState, 3, 1}});
    engine.check_range(token, claimed->ranges.front(), 1);
    // Nothing beyond what it has: no claim.
    const auto none = engine.scheduler.claim(Id128::random(), units, 8);
    REQUIRE(none);
    CHECK(none->blocks == 0);
    CHECK(none->complete);
    CHECK(none->ranges.empty());
    CHECK(code_of(engine.scheduler.claim(Id128::random(), units, 3)) == Errc::kInvalidArgument);
  }

  TEST_CASE("boundaries are all restorable lengths") {
    Engine engine;
    engine.save_eight(1);
    engine.save(kWindow, 1, {1, 2, 3});
    engine.save(kState, 1, {1});
    const auto found = engine.scheduler.boundaries(make_keys(1, 20));
    REQUIRE(found);
    CHECK(found->complete);
    CHECK(found->multiples == std::vector<std::uint32_t>{2, 4});
    CHECK(engine.scheduler.boundaries(make_keys(1, 20), 4)->multiples ==
          std::vector<std::uint32_t>{4});
    CHECK(code_of(engine.scheduler.boundaries(make_keys(1, 20), 1)) == Errc::kInvalidArgument);
  }

  TEST_CASE("wrong kinds are refused, and the connection stays") {
    Engine engine;
    engine.save_eight(1);
    const auto units = make_keys(1, 8);
    const Id128 token = Id128::random();
    REQUIRE(engine.scheduler.claim(token, units));
    CHECK(code_of(engine.worker.open(token, 0, 1, 1, 3)) == Errc::kInvalidArgument);
    CHECK(code_of(engine.worker.open(token, 3, 1, 1, kWindow)) == Errc::kInvalidArgument);
    const JobId job{engine.scheduler.process(), 99};
    CHECK(code_of(engine.worker.reserve(job, make_keys(9, 1), 0, 200)) == Errc::kInvalidArgument);
    REQUIRE(engine.worker.reserve(job, make_keys(9, 1), 0, kState));
    CHECK(code_of(engine.worker.reserve(job, make_keys(9, 1), 0, kFull)) == Errc::kInvalidArgument);
    CHECK(engine.worker.abandon(job));
    CHECK(engine.worker.open(token, 0, 3, 1, kWindow)->size() == 3);

    WireClient other(engine.io, engine.server.socket());
    other.hello();
    Registration wrong = hybrid();
    wrong.instance = "other";
    wrong.kinds.resize(17, wrong.kinds.front());
    auto refused = other.register_rank(wrong);
    CHECK(code_of(refused) == Errc::kInvalidArgument);
    CHECK(refused.error().detail == "17 kinds of blocks: the limit is 16");
    wrong = hybrid();
    wrong.instance = "other";
    wrong.kinds[1].rule = static_cast<wire::Kind::Rule>(9);
    refused = other.register_rank(wrong);
    CHECK(code_of(refused) == Errc::kInvalidArgument);
    CHECK(refused.error().detail == "kind 1 of blocks has rule 9, which is unknown here");
    wrong = hybrid();
    wrong.instance = "other";
    wrong.page_bytes = kPage;
    CHECK(code_of(other.register_rank(wrong)) == Errc::kInvalidArgument);
    wrong.page_bytes = 0;
    CHECK(other.register_rank(wrong));
  }

  TEST_CASE("the journal names the kinds, and a reset ends the blocks of all") {
    Engine engine;
    const auto start = engine.scheduler.journal(0, WireClient::kJournalEnd);
    REQUIRE(start);
    engine.save(kFull, 1, {0});
    const auto plain = engine.scheduler.journal(start->space, start->position);
    REQUIRE(plain);
    CHECK_FALSE(plain->has_kinds);
    engine.save(kState, 1, {0});
    engine.save(kWindow, 1, {0, 1});
    engine.save(kFull, 1, {1});
    const auto part = engine.scheduler.journal(plain->space, plain->position);
    REQUIRE(part);
    CHECK_FALSE(part->lost);
    REQUIRE(part->entries.size() == 4);
    std::vector<std::uint32_t> kinds;
    for (const auto& entry : part->entries) kinds.push_back(entry.kind);
    CHECK(kinds == std::vector<std::uint32_t>{kState, kWindow, kWindow, kFull});
    CHECK(part->entries[0].key == engine.key(kState, 1, 0));

    CHECK(engine.scheduler.lookup(make_keys(1, 2)).blocks == 2);
    CHECK(engine.scheduler.reset_cache().value() == 2);
    CHECK(engine.scheduler.lookup(make_keys(1, 2)).blocks == 0);
    CHECK(engine.scheduler.journal(part->space, part->position)->lost);
    engine.save(kFull, 1, {0, 1});
    CHECK(engine.scheduler.lookup(make_keys(1, 2)).blocks == 0);
    engine.save(kWindow, 1, {0, 1});
    engine.save(kState, 1, {0});
    CHECK(engine.scheduler.lookup(make_keys(1, 2)).blocks == 2);
  }

  TEST_CASE("the status of the instance and the metrics name the kinds") {
    Engine engine;
    engine.save_eight(1);
    const Id128 token = Id128::random();
    REQUIRE(engine.scheduler.claim(token, make_keys(1, 8)));
    REQUIRE(engine.worker.open(token, 0, 3, 1, kWindow));
    const auto list = nlohmann::json::parse(engine.server.get("/instances").body);
    const nlohmann::json& info = list.at("instances").at(0);
    CHECK(info.at("unit_tokens") == 16);
    CHECK(info.at("alignment_tokens") == 32);
    REQUIRE(info.at("kinds").size() == 3);
    CHECK(info.at("kinds").at(0).at("kind") == "full");
    CHECK_FALSE(info.at("kinds").at(0).contains("tokens"));
    CHECK(info.at("kinds").at(1).at("kind") == "window");
    CHECK(info.at("kinds").at(1).at("tokens") == 48);
    CHECK(info.at("kinds").at(2).at("block_tokens") == 32);
    CHECK(info.at("ranks").at(0).at("page_bytes_by_kind") ==
          nlohmann::json({kPage, kPage, 2 * kPage}));

    CHECK(engine.server.metric(R"(pegaflow_kind_saved_blocks_total{kind="full"})") == 8);
    CHECK(engine.server.metric(R"(pegaflow_kind_saved_blocks_total{kind="window"})") == 3);
    CHECK(engine.server.metric(R"(pegaflow_kind_saved_blocks_total{kind="chunk"})") == 0);
    CHECK(engine.server.metric(R"(pegaflow_kind_saved_bytes_total{kind="state"})") == 2 * kPage);
    CHECK(engine.server.metric(R"(pegaflow_kind_loaded_blocks_total{kind="window"})") == 3);
    CHECK(engine.server.metric("pegaflow_cache_block_insertions_total") == 12);
    CHECK(engine.server.metric("pegaflow_save_bytes_total") == 13 * kPage);
    CHECK(engine.server.metric("pegaflow_load_bytes_total") == 3 * kPage);
  }
}

}  // namespace
}  // namespace pegaflow::testing
