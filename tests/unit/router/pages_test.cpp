#include "router/page/pages.h"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "router/page/metrics.h"

namespace pegaflow::router {
namespace {

using nlohmann::json;

json body_of(const std::string& answer) {
  return json::parse(answer.substr(answer.find("\r\n\r\n") + 4));
}

struct LeastLoaded {
  SteadyClock clock;
  Fleet fleet{{},
              {std::move(make_policy("least-load", 1).value()),
               std::move(make_policy("least-load", 1).value())},
              clock};
};

TEST_SUITE("pages") {
  TEST_CASE("errors have the format of the requested API") {
    const std::string openai = error_response(429, "a \"b\"", false, "Retry-After: 1\r\n", true);
    CHECK(openai.find("HTTP/1.1 429 Too Many Requests\r\n") == 0);
    CHECK(openai.find("Retry-After: 1\r\n") != std::string::npos);
    CHECK(openai.find("Connection") == std::string::npos);
    CHECK(body_of(openai)["error"]["message"] == "a \"b\"");
    CHECK(body_of(openai)["error"]["code"] == 429);
    const std::string anthropic = error_response(413, "x", true, {}, false);
    CHECK(anthropic.find("Connection: close\r\n") != std::string::npos);
    CHECK(body_of(anthropic)["error"]["type"] == "request_too_large");
  }

  TEST_CASE("an error frame is one event with JSON") {
    const std::string frame = error_frame(false, Errc::kPeerLost);
    CHECK(frame.find("data: ") == 0);
    CHECK(json::parse(frame.substr(6))["error"]["type"] == "pd_decode_interrupted");
    CHECK(frame.substr(frame.size() - 2) == "\n\n");
    CHECK(error_frame(true, Errc::kTimeout).find("event: error\ndata: {\"type\":\"error\"") == 0);
  }

  TEST_CASE("models are listed once, as they were written") {
    const std::vector<std::string> answers = {R"({"data":[{"id":"a","x":1.50},{"id":"b"}]})",
                                              "nonsense", R"({"data":5})",
                                              R"({"data":[{"id":"\u0061"},{"id":"c"},{}]})"};
    CHECK(merge_models(answers) ==
          R"({"object":"list","data":[{"id":"a","x":1.50},{"id":"b"},{"id":"c"}]})");
    CHECK(merge_models({}) == R"({"object":"list","data":[]})");
  }

  TEST_CASE("health and metrics name every engine") {
    LeastLoaded by_load;
    Fleet& fleet = by_load.fleet;
    fleet.set(EngineList::parse("prefill http://p:1\ndecode http://d:1").value());
    NamespaceView namespaces;
    const auto health = [&](bool is_draining) {
      return health_page(fleet, namespaces, nullptr, is_draining, {});
    };
    HealthPage page = health(false);
    CHECK(page.is_serving);
    CHECK(json::parse(page.text)["status"] == "ok");
    fleet.engines()[0]->is_up = false;
    CHECK(json::parse(health(false).text)["status"] == "degraded");
    fleet.engines()[1]->is_up = false;
    page = health(false);
    CHECK_FALSE(page.is_serving);
    CHECK(json::parse(page.text)["engines"].size() == 2);
    CHECK(json::parse(health(true).text)["status"] == "draining");

    Metrics metrics;
    metrics.requests[{"chat", "2xx"}] = 3;
    metrics.first_event.record(std::chrono::milliseconds(3));
    const std::string text = metrics_page(metrics, fleet, namespaces, nullptr, {});
    for (const char* const line :
         {"pegaflow_router_requests_total{route=\"chat\",status=\"2xx\"} 3",
          "pegaflow_router_engine_up{role=\"decode\",engine=\"http://d:1\"} 0",
          "pegaflow_router_first_event_seconds_bucket{le=\"0.005\"} 1",
          "pegaflow_router_prefill_total{reason=\"beam_search\"} 0"}) {
      CAPTURE(line);
      CHECK(text.find(line) != std::string::npos);
    }
    CHECK(text.find("namespace") == std::string::npos);  // --servers is not set.
  }

  TEST_CASE("a difference of namespaces degrades the health, and is reported") {
    LeastLoaded by_load;
    Fleet& fleet = by_load.fleet;
    fleet.set(EngineList::parse("decode http://d:1").value());
    NamespaceView namespaces{true, {{"http://s:1", true}}, {}};
    CHECK(json::parse(health_page(fleet, namespaces, nullptr, false, {}).text)["status"] == "ok");
    const std::vector<InstanceNamespace> two = {{"p", "1", {{"tp", "1"}}},
                                                {"d", "2", {{"tp", "2"}}}};
    namespaces.report = compare_namespaces(two);
    const HealthPage page = health_page(fleet, namespaces, nullptr, false, {});
    CHECK(page.is_serving);
    CHECK(json::parse(page.text)["status"] == "degraded");
    CHECK(json::parse(page.text)["namespaces"] ==
          json::parse(R"({"instances":2,"different":2,"differs":[{"factor":"tp","values":[
            {"value":"1","instances":["p"]},{"value":"2","instances":["d"]}]}],
            "servers":[{"url":"http://s:1","up":true}]})"));
    namespaces.servers[0].is_up = false;
    const std::string text = metrics_page({}, fleet, namespaces, nullptr, {});
    for (const char* const line :
         {"pegaflow_router_namespaces 2", "pegaflow_router_namespace_instances 2",
          "pegaflow_router_namespace_values{factor=\"tp\"} 2",
          "pegaflow_router_server_up{server=\"http://s:1\"} 0"}) {
      CAPTURE(line);
      CHECK(text.find(line) != std::string::npos);
    }
    namespaces.report = {};
    CHECK(json::parse(health_page(fleet, namespaces, nullptr, false, {}).text)["status"] ==
          "degraded");
  }

  TEST_CASE("pages show direct reads where an engine has a group, or where they are wanted") {
    LeastLoaded by_load;
    Fleet& fleet = by_load.fleet;
    fleet.set(EngineList::parse("decode http://d:1").value());
    NamespaceView view{true, {{"http://s:1", true}}, {}};
    const auto health = [&] {
      return json::parse(health_page(fleet, view, nullptr, false, {}).text);
    };
    CHECK_FALSE(health().contains("direct"));
    CHECK(metrics_page({}, fleet, view, nullptr, {}).find("direct_engines") == std::string::npos);
    view.wants_direct = true;
    CHECK(health().contains("direct"));
    view.wants_direct = false;
    view.direct = {.paired = 2, .alone = {{"e", "http://s:1", "alone"}}, .has_groups = true};
    CHECK(health()["direct"]["paired"] == 2);
    CHECK(health()["direct"]["alone"][0]["instance"] == "e");
    CHECK(health()["status"] == "ok");  // Its requests are answered from the pool.
    const std::string text = metrics_page({}, fleet, view, nullptr, {});
    CHECK(text.find("pegaflow_router_direct_engines 2\n") != std::string::npos);
    CHECK(text.find("pegaflow_router_direct_engines_alone 1\n") != std::string::npos);
  }

  TEST_CASE("a model that no engine serves is rejected as vLLM rejects it") {
    const std::string answer = unknown_model_response("a\"b", false, "X: y\r\n", true);
    CHECK(answer.starts_with("HTTP/1.1 404 Not Found\r\n"));
    CHECK(answer.ends_with(R"({"error":{"message":"The model `a\"b` does not exist.",)"
                           R"("type":"NotFoundError","param":"model","code":404}})"));
    CHECK(unknown_model_response("m", true, "", false).find(R"("type":"not_found_error")") !=
          std::string::npos);
    CHECK(unknown_model_response(std::string(100'000, 'x'), false, "", true).size() < 1000);
  }

  TEST_CASE("the models of a response are read in order") {
    CHECK(read_model_ids(R"({"data":[{"id":"b"},{"id":"a","x":[1]},{"no":1}]})").value() ==
          std::vector<std::string>{"b", "a"});
    CHECK(read_model_ids(R"({"data":[]})").value().empty());
    CHECK(read_adapter_ids(R"({"data":[{"id":"b","parent":null},{"id":"a","parent":"b"}]})") ==
          std::vector<std::string>{"a"});
    CHECK(read_adapter_ids("no list").empty());
    for (const char* const bad : {"", "{}", R"({"data":1})", R"([])", R"({"data":[1})"}) {
      CHECK_FALSE(read_model_ids(bad).has_value());
    }
  }
}

}  // namespace
}  // namespace pegaflow::router
