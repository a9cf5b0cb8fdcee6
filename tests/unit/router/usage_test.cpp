#include "router/body/usage.h"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "router/body/full_report.h"

namespace pegaflow::router {
namespace {

TEST_SUITE("usage") {
  TEST_CASE("the tokens of a prompt are read from responses of both APIs, streamed or not") {
    const auto openai = find_usage(
        R"({"choices":[{"text":"\"usage\":{"}],"usage": {"prompt_tokens":48,"total_tokens":50,)"
        R"("prompt_tokens_details":{"cached_tokens":32}}})");
    REQUIRE(openai);
    CHECK(openai->prompt_tokens == 48);
    CHECK(openai->cached_tokens == 32);
    const auto bare = find_usage(R"({"usage":{"prompt_tokens":48,"prompt_tokens_details":null}})");
    REQUIRE(bare);
    CHECK(!bare->cached_tokens);
    const auto stream = find_usage(
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}\n\n"
        "data: [DONE]\n\n");
    REQUIRE(stream);
    CHECK(stream->prompt_tokens == 7);
    const auto anthropic =
        find_usage(R"({"usage":{"input_tokens":9,"cache_read_input_tokens":0}})");
    REQUIRE(anthropic);
    CHECK(anthropic->prompt_tokens == 9);
    CHECK(anthropic->cached_tokens == 0);
    CHECK(find_usage(R"({"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4}}})")
              ->cached_tokens == 4);
  }

  TEST_CASE("a piece without a whole usage has none") {
    for (const std::string_view piece :
         {"", "data: {\"usage\":null}", "\"usage\":", "\"usage\":{\"prompt_tokens\":4",
          "\"usage\":{\"prompt_tokens\":-4}", "\"usage\":{\"prompt_tokens\":\"4\"}", "\"usage\":{}",
          "\"usage\":{{{{", "\"usage\":}"}) {
      CAPTURE(piece);
      CHECK(!find_usage(piece));
    }
  }

  TEST_CASE("a full report is added to the body without changing anything else") {
    using nlohmann::json;
    const auto mode = [](std::string_view body) {
      return json::parse(with_full_report(body))["vllm_xargs"].dump();
    };
    CHECK(with_full_report(R"({"prompt": 1.50})") ==
          R"({"vllm_xargs":{"kv_cache_report_mode":"full"},"prompt": 1.50})");
    CHECK(with_full_report(" {}") == R"( {"vllm_xargs":{"kv_cache_report_mode":"full"}})");
    CHECK(mode(R"({"a":1,"vllm_xargs":{"b": 2}})") == R"({"b":2,"kv_cache_report_mode":"full"})");
    CHECK(mode(R"({"vllm_xargs":{ }})") == R"({"kv_cache_report_mode":"full"})");
    CHECK(with_full_report(R"({"vllm_xargs":null})") == R"({"vllm_xargs":null})");
    CHECK(with_full_report("no JSON") == "no JSON");
  }
}

}  // namespace
}  // namespace pegaflow::router
