#include "router/routing/direct_report.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "router/routing/namespaces.h"

namespace pegaflow::router {
namespace {

using nlohmann::json;

InstanceNamespace instance(std::string name, std::string hash, std::optional<DirectMemory> direct) {
  return {std::move(name), std::move(hash), {}, std::move(direct)};
}

const DirectMemory kHost{"pd", "process_vm_readv"};
const DirectMemory kGpu{"pd", "cuda"};

/// The report about instances, each at the server of the same place.
DirectReport report_of(const std::vector<InstanceNamespace>& instances,
                       const std::vector<std::string_view>& servers) {
  std::vector<ServedInstance> served;
  for (std::size_t i = 0; i < instances.size(); ++i) served.push_back({servers[i], &instances[i]});
  return pair_engines(served);
}

TEST_SUITE("engines that read each other") {
  TEST_CASE("the memory of an instance is read where all its connected ranks have the same") {
    const auto direct_of = [](std::string_view ranks) {
      const std::string answer =
          R"({"instances":[{"instance":"p","connected":true,"factors":[],"ranks":)" +
          std::string(ranks) + "}]}";
      return read_instances(answer).value().front().direct;
    };
    const std::string host =
        R"({"connected":true,"direct":{"group":"pd","lane":"process_vm_readv"}})";
    const std::string gpu = R"({"connected":true,"direct":{"group":"pd","lane":"cuda"}})";
    const std::string none = R"({"connected":true})";
    const std::string away = R"({"connected":false})";
    CHECK(direct_of("[" + host + "]") == kHost);
    CHECK(direct_of("[" + away + "," + gpu + "," + gpu + "]") == kGpu);
    CHECK_FALSE(direct_of("[" + host + "," + gpu + "]"));
    CHECK_FALSE(direct_of("[" + host + "," + none + "]"));
    CHECK_FALSE(direct_of("[" + none + "," + host + "]"));
    CHECK_FALSE(direct_of("[]"));
    CHECK_FALSE(direct_of(R"([{"connected":true,"direct":null}])"));
    for (const char* const bad : {"1", "[]", "{}", R"({"group":"","lane":"cuda"})"}) {
      CAPTURE(bad);
      const auto found = read_instances(
          R"({"instances":[{"connected":true,"factors":[],"ranks":[{"connected":true,"direct":)" +
          std::string(bad) + "}]}]}");
      REQUIRE_FALSE(found);
      CHECK(found.error().code == Errc::kCorrupt);
    }
  }

  TEST_CASE("two engines of one server with the same group, lane and namespace are partners") {
    const DirectReport report =
        report_of({instance("p", "1", kHost), instance("d", "1", kHost)}, {"a", "a"});
    CHECK(report.paired == 2);
    CHECK(report.alone.empty());
    CHECK(report.has_groups);
    CHECK(report.text().empty());
    CHECK(json::parse(report.json()) == json::parse(R"({"paired":2,"alone":[]})"));
  }

  TEST_CASE("an engine without a partner is named with the reason") {
    std::vector<InstanceNamespace> two = {instance("p", "1", kHost), instance("d", "1", kHost)};
    std::vector<std::string_view> servers = {"a", "a"};
    std::string_view why;
    SUBCASE("another server") {
      servers[1] = "b";
      why = "no other engine of its server is in the direct group \"pd\"";
    }
    SUBCASE("another group") {
      two[1].direct->group = "dp";
      why = "no other engine of its server is in the direct group \"pd\"";
    }
    SUBCASE("another lane") {
      two[1].direct = kGpu;
      why =
          "the direct group \"pd\" has no other engine with the lane process_vm_readv, and one "
          "with cuda";
    }
    SUBCASE("another namespace") {
      two[1].hash = "2";
      why = "the other engines of the direct group \"pd\" have other namespaces";
    }
    SUBCASE("no group") {
      two[0].direct.reset();
      why =
          "its workers have registered no memory: pegaflow.direct_group is not set, or their "
          "logs have the reason";
    }
    const DirectReport report = report_of(two, servers);
    CHECK(report.paired == 0);
    REQUIRE(report.alone.size() == 2);
    CHECK(report.alone[0].instance == "p");
    CHECK(report.alone[0].server == "a");
    CHECK(report.alone[0].why == why);
    CHECK(report.text().starts_with("p at a: "));
    CHECK(json::parse(report.json())["alone"][0] ==
          json{{"instance", "p"}, {"server", "a"}, {"why", why}});
  }

  TEST_CASE("a partner counts beside engines of other lanes and namespaces") {
    const DirectReport report = report_of({instance("p", "1", kHost), instance("g", "1", kGpu),
                                           instance("o", "2", kHost), instance("d", "1", kHost)},
                                          {"a", "a", "a", "a"});
    CHECK(report.paired == 2);
    REQUIRE(report.alone.size() == 2);
    CHECK(report.alone[0].instance == "g");
    CHECK(report.alone[1].instance == "o");
    CHECK(report.alone[1].why ==
          "the other engines of the direct group \"pd\" have other namespaces");
  }

  TEST_CASE("a line of the log names the first engines only") {
    std::vector<InstanceNamespace> many;
    for (int i = 0; i < 20; ++i) many.push_back(instance("e" + std::to_string(i), "1", {}));
    const DirectReport report = report_of(many, std::vector<std::string_view>(20, "a"));
    CHECK_FALSE(report.has_groups);
    CHECK(report.text().ends_with("; and 12 more"));
    CHECK(report.text().find("e8 ") == std::string::npos);
    CHECK(json::parse(report.json())["alone"].size() == 20);
  }
}

}  // namespace
}  // namespace pegaflow::router
