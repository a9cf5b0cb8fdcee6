// Reports of engines about themselves: the reason why they are not served, and their copy path.
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/support/server_process.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

using nlohmann::json;

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

Decline of_worker(std::uint32_t rank, const std::string& detail) {
  return {.instance = "engine",
          .side = wire::Side::WORKER,
          .rank = rank,
          .reason = wire::DeclineReason::WEIGHTS,
          .detail = detail};
}

Result<void> decline(WireClient& client, kj::AsyncIoContext& io, const Decline& why) {
  auto request = client.session().declineRequest();
  write_decline(why, request);
  return read_done(request.send().wait(io.waitScope));
}

Result<void> describe(WireClient& client, kj::AsyncIoContext& io, const EngineInfo& engine) {
  auto request = client.session().describeRequest();
  write_engine(engine, request);
  return read_done(request.send().wait(io.waitScope));
}

json instances(const ServerProcess& server) {
  return json::parse(server.get("/instances").body).at("instances");
}

TEST_SUITE("notices") {
  TEST_CASE("the server announces them in hello") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient client(io, server.socket());

    auto request = client.gate().helloRequest();
    request.setMinimum(kWireMaximum);
    request.setMaximum(kWireMaximum);
    write_id(Id128::random(), request.initProcess());
    const auto answer = request.send().wait(io.waitScope);

    CHECK((answer.getFeatures() & kFeatureNotices) != 0);
  }

  TEST_CASE("an engine that declines is shown with its reason until its connection ends") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    {
      WireClient worker(io, server.socket());
      worker.hello();
      REQUIRE(decline(worker, io, of_worker(1, "the weights\nhave no id\x1b[2J")));
      WireClient lower(io, server.socket());
      lower.hello();
      REQUIRE(decline(lower, io, of_worker(0, "the same")));

      const json list = instances(server);

      REQUIRE(list.size() == 1);
      const json& engine = list.at(0);
      CHECK(engine.at("instance") == "engine");
      CHECK(engine.at("connected") == false);
      CHECK(engine.at("state") == "not served: the same");
      REQUIRE(engine.at("not_served").size() == 2);
      const json& row = engine.at("not_served").at(1);
      CHECK(row.at("side") == "worker");
      CHECK(row.at("rank") == 1);
      CHECK(row.at("reason") == "weights");
      CHECK(row.at("build") == "a test");
      CHECK(row.at("detail") == "the weights have no id [2J");
      CHECK(server.metric("pegaflow_instances_not_served{reason=\"weights\"}") == 1);
      CHECK(server.metric("pegaflow_instances_not_served{reason=\"model\"}") == 0);
      CHECK(has(server.log(), "the weights have no id [2J"));
    }
    CHECK(server.metric_becomes("pegaflow_instances_not_served{reason=\"weights\"}", 0));
    CHECK(instances(server).empty());
  }

  TEST_CASE("an attached scheduler is shown as not served once its worker declines") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient scheduler(io, server.socket());
    scheduler.hello();
    REQUIRE(scheduler.attach("engine"));
    WireClient worker(io, server.socket());
    worker.hello();
    REQUIRE(decline(worker, io, of_worker(0, "no id")));

    const json list = instances(server);

    REQUIRE(list.size() == 1);
    CHECK(list.at(0).at("state") == "not served: no id");
    CHECK(list.at(0).at("schedulers") == 1);
    REQUIRE(worker.goodbye());
    CHECK(instances(server).at(0).at("state") == "disconnected");
  }

  TEST_CASE("a served client cannot decline, and one that declined is not served") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient worker(io, server.socket());
    worker.hello();
    REQUIRE(worker.register_rank("engine", 4096));
    CHECK(decline(worker, io, of_worker(0, "no")).error().code == Errc::kInvalidArgument);
    WireClient other(io, server.socket());
    other.hello();
    CHECK(describe(other, io, {}).error().code == Errc::kInvalidArgument);
    REQUIRE(decline(other, io, of_worker(0, "no")));

    CHECK(other.attach("engine").error().code == Errc::kInvalidArgument);
    CHECK(other.register_rank("elsewhere", 4096).error().code == Errc::kInvalidArgument);
    CHECK(worker.lookup(make_keys(1, 1)).complete);
  }

  TEST_CASE("at most 256 connections decline at once, and each any number of times") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    std::vector<std::unique_ptr<WireClient>> clients;
    for (int i = 0; i < 256; ++i) {
      clients.push_back(std::make_unique<WireClient>(io, server.socket()));
      clients.back()->hello();
      REQUIRE(decline(*clients.back(), io, of_worker(0, "no")));
    }
    WireClient beyond(io, server.socket());
    beyond.hello();

    CHECK(decline(beyond, io, of_worker(0, "no")).error().code == Errc::kBusy);

    for (int i = 0; i < 100; ++i) REQUIRE(decline(*clients[0], io, of_worker(0, "again")));
    CHECK(server.metric("pegaflow_instances_not_served{reason=\"weights\"}") == 1);
    REQUIRE(clients[1]->goodbye());
    CHECK(decline(beyond, io, of_worker(0, "no")));
    CHECK_FALSE(has(server.log(), "again"));  // A repeated report is not logged.
  }

  TEST_CASE("device, kernels and copy path are shown beside their rank") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient worker(io, server.socket());
    worker.hello();
    REQUIRE(worker.register_rank("engine", 4096));
    CHECK_FALSE(instances(server).at(0).at("ranks").at(0).contains("kernels"));
    WireClient scheduler(io, server.socket());
    scheduler.hello();
    REQUIRE(scheduler.attach("engine"));

    REQUIRE(describe(worker, io,
                     {.device = "NVIDIA H200",
                      .kernels = wire::Engine::Kernels::MISSING,
                      .copy_path = wire::Engine::CopyPath::DIRECT}));
    REQUIRE(describe(scheduler, io, {.loads = false}));

    const json engine = instances(server).at(0);
    const json& rank = engine.at("ranks").at(0);
    CHECK(rank.at("device") == "NVIDIA H200");
    CHECK(rank.at("kernels") == "missing");
    CHECK(rank.at("copy_path") == "direct");
    CHECK(rank.at("saves") == true);
    CHECK(engine.at("loads") == false);
    CHECK(engine.at("saves") == true);
  }
}

}  // namespace
}  // namespace pegaflow::testing
