#include "router/body/steering.h"

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "router/body/body_session.h"

namespace pegaflow::router {
namespace {

using nlohmann::json;

std::string known(const std::string& body) {
  return without_steering(body, SteeringDepth::kKnownPath).value().value_or("(as it is)");
}

std::string anywhere(const std::string& body) {
  return without_steering(body, SteeringDepth::kAnywhere).value().value_or("(as it is)");
}

TEST_SUITE("steering") {
  TEST_CASE("members that only a router sends are removed, and nothing else changes") {
    for (const auto& [body, left] : std::initializer_list<std::pair<const char*, const char*>>{
             {R"({})", "(as it is)"},
             {R"({"kv_transfer_params":1})", R"({})"},
             {R"( { "kv_transfer_params" : {"a":[1]} } )", R"( {  } )"},
             {R"({"a":1 , "kv_transfer_params":{"b":2}, "c": 3.0})", R"({"a":1 , "c": 3.0})"},
             {R"({"a":1 , "kv_hints":{"b":2} })", R"({"a":1 })"},
             {R"({"kv_hints":1,"a":1,"ec_transfer_params":2})", R"({"a":1})"},
             {R"({"kv_hints":1,"kv_hints":2,"kv_hints":3})", R"({})"},
             {R"({"a":1,"kv_hints":1,"kv_hints":2})", R"({"a":1})"},
             {R"({"kv_transf\u0065r_params":1,"\u006bv_hints":2,"n":1.0})", R"({"n":1.0})"},
             {R"({"kv_cache_report_mode":"full","a":"kv_hints"})", R"({"a":"kv_hints"})"},
             {R"({"session_id":"pf1:0"})", R"({})"},
             {R"({"session_id":"\u0070f1:0"})", R"({})"},
             {R"({"session_id":"mine"})", "(as it is)"},
             {R"({"vllm_xargs":{"a":1,"kv_cache_report_mode":"full"}})",
              R"({"vllm_xargs":{"a":1}})"},
             {R"({"vllm_xargs":{"session_id":"pf1:1","kv_transfer_params":"x"},"n":1})",
              R"({"vllm_xargs":{},"n":1})"},
             {R"({"tools":[{"kv_hints":1}],"x":{"kv_hints":1}})", "(as it is)"},
         }) {
      CAPTURE(body);
      CHECK(known(body) == left);
    }
  }

  TEST_CASE("for paths of --pass they are removed at every depth") {
    CHECK(anywhere(R"([{"kv_hints":1,"a":[{"b":{"kv_transfer_params":{"kv_hints":2}}}]},3])") ==
          R"([{"a":[{"b":{}}]},3])");
    CHECK(anywhere(R"({"sampling_params":{"extra_args":{"kv_transfer_params":{}},"n":1}})") ==
          R"({"sampling_params":{"extra_args":{},"n":1}})");
    CHECK(anywhere(R"("kv_hints")") == "(as it is)");
    CHECK(anywhere("12") == "(as it is)");
  }

  TEST_CASE("a body that is not JSON is rejected") {
    for (const char* const bad : {"", "{", "{}{}", R"({"a":})", R"({"a":1,})", "[1,]", "{]", "[}",
                                  R"({"kv_hints":1)", R"({1:2})", "\xff\xfe{\0}"}) {
      CAPTURE(bad);
      CHECK_FALSE(without_steering(bad, SteeringDepth::kAnywhere));
    }
    const std::string deep(300, '[');
    CHECK_FALSE(without_steering(deep + std::string(300, ']'), SteeringDepth::kAnywhere));
  }

  TEST_CASE("random bodies: another parser sees the same body without those members") {
    std::mt19937 random(11);  // The same in every run.
    const std::vector<std::string> keys = {"kv_hints", "a",          "kv_transfer_params",
                                           "b",        "vllm_xargs", "session_id"};
    const auto blank = [&] { return std::string(random() % 3, ' '); };
    // A text, and the same text without the members.
    std::function<std::pair<std::string, json>(int)> draw = [&](int depth) {
      const std::uint64_t kind = random() % (depth > 4 ? 3 : 5);
      if (kind == 0) return std::pair<std::string, json>{"12", 12};
      if (kind == 1) return std::pair<std::string, json>{R"("kv_hints")", "kv_hints"};
      if (kind == 2) return std::pair<std::string, json>{R"("pf1:7")", "pf1:7"};
      std::string text(1, kind == 3 ? '[' : '{');
      json value = kind == 3 ? json::array() : json::object();
      for (unsigned i = 0, count = random() % 4; i < count; ++i) {
        if (i > 0) text += ',';
        text += blank();
        const auto [inner, left] = draw(depth + 1);
        if (kind == 3) {
          text += inner + blank();
          value.push_back(left);
          continue;
        }
        const std::string& key = keys[random() % keys.size()];
        text.append(1, '"').append(key).append(1, '"').append(blank()).append(1, ':');
        text.append(blank()).append(inner).append(blank());
        const bool goes = key.starts_with("kv_") || (key == "session_id" && inner == R"("pf1:7")");
        if (!goes) value[key] = left;
      }
      return std::pair<std::string, json>{text + (kind == 3 ? ']' : '}'), value};
    };
    for (int i = 0; i < 5000; ++i) {
      const auto [text, left] = draw(0);
      CAPTURE(text);
      const auto cut = without_steering(text, SteeringDepth::kAnywhere).value();
      CHECK(json::parse(cut.value_or(text)) == left);
    }
  }

  TEST_CASE("a session id for the body leaves the client's own as it is") {
    CHECK(with_session(R"({"a":1})", "pf1:7") == R"({"session_id":"pf1:7","a":1})");
    CHECK(with_session(" {}", "pf1:7") == R"( {"session_id":"pf1:7"})");
    CHECK(with_session(R"({})", R"(a"b)") == R"({"session_id":"a\"b"})");
    for (const char* own : {R"({"session_id":"x"})", R"({"session_params":{"id":"x"}})",
                            R"({"session\u005fid":"x"})", "not JSON"}) {
      CHECK(with_session(own, "pf1:7") == own);
    }
  }
}

}  // namespace
}  // namespace pegaflow::router
