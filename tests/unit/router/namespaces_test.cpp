#include "router/routing/namespaces.h"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

namespace pegaflow::router {
namespace {

TEST_SUITE("namespaces") {
  TEST_CASE("connected instances are read with their factors") {
    const auto found = read_instances(R"({
      "instances": [
        {"instance": "p \"0\"", "state": "connected", "connected": true, "namespace": "aa",
         "factors": [{"name": "tp", "value": "1"}, {"name": "kv_dtype", "value": "fp8"}],
         "ranks": [{"rank": 0}]},
        {"instance": "gone", "connected": false, "namespace": "bb", "factors": []}
      ]})")
                           .value();
    REQUIRE(found.size() == 1);
    CHECK(found[0].instance == "p \"0\"");
    CHECK(found[0].hash == "aa");
    CHECK(found[0].factors ==
          std::vector<std::pair<std::string, std::string>>{{"tp", "1"}, {"kv_dtype", "fp8"}});
    CHECK(read_instances(R"({"instances":[]})").value().empty());
  }

  TEST_CASE("an invalid list of instances is an error") {
    for (const char* const bad : {"", "[]", "{}", R"({"instances":5})", R"({"instances":[5]})",
                                  R"({"instances":[{"connected":true}]})",
                                  R"({"instances":[{"connected":true,"factors":[1]}]})"}) {
      CAPTURE(bad);
      const auto found = read_instances(bad);
      REQUIRE_FALSE(found);
      CHECK(found.error().code == Errc::kCorrupt);
    }
  }

  TEST_CASE("equal namespaces have no differences") {
    CHECK(compare_namespaces({}).namespaces == 0);
    const std::vector<InstanceNamespace> same = {{"p", "1", {{"tp", "1"}}},
                                                 {"d", "1", {{"tp", "1"}}}};
    const NamespaceReport report = compare_namespaces(same);
    CHECK(report.instances == 2);
    CHECK(report.namespaces == 1);
    CHECK(report.differences.empty());
    CHECK(report.text().empty());
  }

  TEST_CASE("differing factors are reported with their values and instances") {
    const std::vector<InstanceNamespace> three = {
        {"p", "1", {{"tp", "1"}, {"dtype", "bf16"}}},
        {"d", "2", {{"tp", "2"}, {"dtype", "bf16"}}},
        {"e", "3", {{"tp", "2"}, {"dtype", "bf16"}, {"new", "x"}}}};
    const NamespaceReport report = compare_namespaces(three);
    CHECK(report.namespaces == 3);
    REQUIRE(report.differences.size() == 2);
    CHECK(report.text() ==
          "tp is \"1\" for p, \"2\" for d, e; new is \"(none)\" for p, d, \"x\" for e");
  }

  TEST_CASE("hashes that differ with equal factors are reported as such") {
    const std::vector<InstanceNamespace> two = {{"p", "1", {{"tp", "1"}}},
                                                {"d", "2", {{"tp", "1"}}}};
    CHECK(compare_namespaces(two).text() == "namespace is \"1\" for p, \"2\" for d");
  }

  TEST_CASE("long values are shown where they differ, many instances by the first ones") {
    std::vector<InstanceNamespace> many;
    for (int i = 0; i < 12; ++i) {
      std::string value(500, 'x');
      value += i == 0 ? "\xc3\xa4" + std::string(300, 'y') : std::string("\xc3\xb6");
      many.push_back({std::to_string(i), i == 0 ? "a" : "b", {{"layers", value}}});
    }
    const std::string text = compare_namespaces(many).text();
    CHECK(text.find("...xxxxxxx\xc3\xb6\" for 1, 2, 3, 4, 5, 6, 7, 8 and 3 more") !=
          std::string::npos);
    CHECK(text.size() < 400);
    CHECK_NOTHROW((void)nlohmann::json(text).dump());  // Whole characters.
    NamespaceView view;
    view.report = compare_namespaces(many);
    CHECK(nlohmann::json::parse(view.json())["differs"][0]["values"][1]["instances"].size() == 11);
  }
}

}  // namespace
}  // namespace pegaflow::router
