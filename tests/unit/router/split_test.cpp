#include "router/body/split.h"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

namespace pegaflow::router {
namespace {

using nlohmann::json;

Prefill decide_on(const std::string& body, std::size_t tokens = 1) {
  return decide(read_members(body).value(), false, tokens);
}

TEST_SUITE("split") {
  TEST_CASE("only requests that need the whole prompt at one engine are not split") {
    CHECK(decide_on(R"({"prompt":"some words"})") == Prefill::kDone);
    CHECK(decide_on(R"({"prompt":"some words","logprobs":5,"n":3,"tools":[]})") == Prefill::kDone);
    CHECK(decide_on(R"({"prompt":"some words","prompt_logprobs":0})") == Prefill::kPromptLogprobs);
    CHECK(decide_on(R"({"prompt":"some words","prompt_logprobs":null})") == Prefill::kDone);
    CHECK(decide_on(R"({"prompt":"some words","echo":true,"logprobs":1})") == Prefill::kEcho);
    CHECK(decide_on(R"({"prompt":"some words","echo":true})") == Prefill::kDone);
    CHECK(decide_on(R"({"prompt":"some words","echo":false,"logprobs":1})") == Prefill::kDone);
    CHECK(decide_on(R"({"prompt_embeds":"AA"})") == Prefill::kPromptEmbeds);
    CHECK(decide_on(R"({"prompt":"some words","use_beam_search":true})") == Prefill::kBeamSearch);
  }

  TEST_CASE(
      "Anthropic: a named tool is not split, and the prefill engine receives no thinking budget") {
    const auto members = [](std::string_view text) { return read_members(text).value(); };
    const std::string tool = R"({"system":"words","tool_choice":{"name":"t","type":"t\u006fol"}})";
    CHECK(decide(members(tool), true, 1) == Prefill::kToolChoice);
    CHECK(decide(members(tool), false, 1) == Prefill::kDone);
    for (const std::string_view choice : {R"({"type":"any"})", R"({"type":["tool"]})", "{}", "null",
                                          "\"tool\"", R"({"type":"auto","name":"tool"})"}) {
      const std::string body = fmt::format(R"({{"system":"words","tool_choice":{}}})", choice);
      CAPTURE(body);
      CHECK(decide(members(body), true, 1) == Prefill::kDone);
    }

    const auto sent = [&](const std::string& text, bool is_anthropic) {
      return json::parse(prefill_body(members(text), is_anthropic, Flow::kStore));
    };
    const std::string enabled = R"({"thinking":{"type":"enabled","budget_tokens":2000}})";
    CHECK_FALSE(sent(enabled, true).contains("thinking"));
    CHECK(sent(enabled, false)["thinking"]["budget_tokens"] == 2000);
    CHECK(sent(R"({"thinking":{"type":"disabled"}})", true)["thinking"]["type"] == "disabled");
    CHECK(sent(R"({"thinking":null})", true)["thinking"].is_null());
  }

  TEST_CASE("the length of a prompt includes all of its parts") {
    const std::string parts =
        R"({"system":"0123456789","messages":[{"a":"0123456789"}],"tools":["0123456789"]})";
    CHECK(decide_on(parts, 11) == Prefill::kDone);  // 12 + 20 + 14 bytes.
    CHECK(decide_on(parts, 12) == Prefill::kShort);
    CHECK(decide_on(R"({"model":"0123456789"})", 1) == Prefill::kShort);
    CHECK(decide_on(R"({})", 0) == Prefill::kDone);
  }

  TEST_CASE("the prefill engine computes one token of the same prompt") {
    const std::string body =
        R"({"messages":[{"content":"x"}],"tools":[1.50],"max_tokens":9,"stream":true,"n":4,)"
        R"("stream_options":{},"min_tokens":3,"logprobs":true,"top_logprobs":2,"seed":7,)"
        R"("logprob_token_ids":[1],)"
        R"("max_completion_tokens":8,"max\u005ftokens":10,"kv_transfer_params":{"evil":1}})";
    const json sent = json::parse(prefill_body(read_members(body).value(), false, Flow::kStore));
    CHECK(sent == json::parse(R"({"messages":[{"content":"x"}],"tools":[1.50],"seed":7,)"
                              R"("max_tokens":1,"max_completion_tokens":1,"n":1,"stream":false,)"
                              R"("kv_transfer_params":{"pegaflow":{"save_tail":true}}})"));
    const json nixl = json::parse(prefill_body(read_members("{}").value(), false, Flow::kKvParams));
    CHECK(nixl["kv_transfer_params"]["do_remote_decode"] == true);
    CHECK(nixl["kv_transfer_params"]["remote_block_ids"].is_null());
  }

  TEST_CASE("the decode engine receives the client's bytes") {
    const std::string body = " { \"n\": 1.0 }";
    const auto members = read_members(body).value();
    CHECK(decode_body(body, members, "") == body);
    CHECK(decode_body(body, members, R"({"x":1})") ==
          R"({"kv_transfer_params":{"x":1}, "n": 1.0 })");
    CHECK(decode_body("{}", {}, R"({"x":1})") == R"({"kv_transfer_params":{"x":1}})");
  }

  TEST_CASE("parameters are taken from a response unchanged, or not at all") {
    CHECK(kv_params_of(R"({"id":"x","kv_transfer_params": {"a": 1.0} })") == R"({"a": 1.0})");
    CHECK(kv_params_of(R"({"kv_transfer_params":null})").empty());
    CHECK(kv_params_of(R"({"kv_transfer_params":[1]})").empty());
    CHECK(kv_params_of("no JSON").empty());
  }

  TEST_CASE("a prompt is identified by its beginning") {
    const std::string body = R"({"model":"m","messages":[1,2,3],"prompt":"x"})";
    CHECK(prompt_prefix(read_members(body).value(), 4) == "[1,2");
    CHECK(prompt_prefix(read_members("{}").value(), 4).empty());
  }

  TEST_CASE("flows have names") {
    CHECK(parse_flow("store").value() == Flow::kStore);
    CHECK(parse_flow("auto").value() == Flow::kAuto);
    CHECK(parse_flow("kv-params").value() == Flow::kKvParams);
    CHECK(parse_flow("x").error().code == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::router
