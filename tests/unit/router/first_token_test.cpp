#include "router/body/first_token.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace pegaflow::router {
namespace {

using nlohmann::json;

FirstToken decide_on(const std::string& more, std::size_t bytes = 1000) {
  const std::string body = R"({"stream":true,"prompt":"words")" + more + "}";
  return decide_first_token(read_members(body).value(), bytes);
}

std::string answer(const char* text, const char* finish_reason = R"("length")",
                   const char* tokens = "[7]", const char* prompt = "[1, 2,3]") {
  return fmt::format(R"({{"id":"cmpl-x","created":12,"model":"m","choices":[{{"index":0,"text":{},)"
                     R"("finish_reason":{},"token_ids":{},"prompt_token_ids":{}}}],)"
                     R"("kv_transfer_params":{{"pegaflow":{{}}}}}})",
                     text, finish_reason, tokens, prompt);
}

FirstToken why_not(const std::string& text) {
  FirstToken why = FirstToken::kSent;
  CHECK_FALSE(read_first_token(text, why));
  return why;
}

TEST_SUITE("first_token") {
  TEST_CASE("a usual request may begin with the prefill engine's token") {
    for (const char* const more :
         {"", R"(,"max_tokens":2)", R"(,"n":1,"best_of":1,"seed":null,"stop":[],"echo":false)",
          R"(,"presence_penalty":0,"frequency_penalty":0.00,"repetition_penalty":1.0)",
          R"(,"temperature":0.7,"top_p":0.9,"top_k":5,"min_p":0.1,"ignore_eos":true,"user":"u")",
          R"(,"stream_options":{"include_usage":true,"continuous_usage_stats":false})",
          R"(,"logprobs":null,"response_format":null,"stream_options":null)"}) {
      CAPTURE(more);
      CHECK(decide_on(more) == FirstToken::kSent);
    }
    const auto tokens = read_members(R"({"prompt":[ 1,2],"stream":true})").value();
    CHECK(decide_first_token(tokens, 10) == FirstToken::kSent);
  }

  TEST_CASE("every other request has a reason against it") {
    const std::vector<std::pair<const char*, FirstToken>> cases = {
        {R"(,"stream":false)", FirstToken::kNotStreamed},
        {R"(,"stream":null)", FirstToken::kNotStreamed},
        {R"(,"prompt":["a"])", FirstToken::kChoices},
        {R"(,"prompt":[[1]])", FirstToken::kChoices},
        {R"(,"prompt":[])", FirstToken::kChoices},
        {R"(,"prompt":null)", FirstToken::kChoices},
        {R"(,"n":2)", FirstToken::kChoices},
        {R"(,"best_of":2)", FirstToken::kChoices},
        {R"(,"response_format":{"type":"json_object"})", FirstToken::kGrammar},
        {R"(,"structured_outputs":{"regex":"a"})", FirstToken::kGrammar},
        {R"(,"guided_regex":"a","x":1)", FirstToken::kGrammar},
        {R"(,"x":1,"seed":0)", FirstToken::kSeed},
        {R"(,"presence_penalty":0.1)", FirstToken::kPenalties},
        {R"(,"frequency_penalty":-0.0)", FirstToken::kPenalties},
        {R"(,"repetition_penalty":1.05)", FirstToken::kPenalties},
        {R"(,"stop":"a")", FirstToken::kStop},
        {R"(,"stop":["a"])", FirstToken::kStop},
        {R"(,"stop_token_ids":[5])", FirstToken::kStop},
        {R"(,"logprobs":0)", FirstToken::kLogprobs},
        {R"(,"max_tokens":1)", FirstToken::kOneToken},
        {R"(,"max_tokens":0)", FirstToken::kOneToken},
        {R"(,"max_tokens":2.5)", FirstToken::kOther},
        {R"(,"max_tokens":null)", FirstToken::kOther},
        {R"(,"echo":true)", FirstToken::kOther},
        {R"(,"min_tokens":2)", FirstToken::kOther},
        {R"(,"return_token_ids":true)", FirstToken::kOther},
        {R"(,"vllm_xargs":{})", FirstToken::kOther},
        {R"(,"stream_options":{"continuous_usage_stats":true})", FirstToken::kOther},
        {R"(,"s\u0065ed":4)", FirstToken::kSeed},
        {R"(,"seed":4,"seed":null)", FirstToken::kSeed}};
    for (const auto& [more, why] : cases) {
      CAPTURE(more);
      CHECK(to_string(decide_on(more)) == to_string(why));
    }
    CHECK(decide_on("", kFirstTokenBodyBytes) == FirstToken::kSent);
    CHECK(decide_on("", kFirstTokenBodyBytes + 1) == FirstToken::kLong);
  }

  TEST_CASE("the token of a response becomes the first event") {
    FirstToken why = FirstToken::kNoToken;
    const auto token = read_first_token(answer(R"(" a\"\u00e4")"), why);
    REQUIRE(token);
    CHECK(why == FirstToken::kSent);
    const std::string event = first_event(*token);
    CHECK(event.find("data: ") == 0);
    CHECK(event.substr(event.size() - 2) == "\n\n");
    const json sent = json::parse(event.substr(6));
    CHECK(sent["id"] == "cmpl-x");
    CHECK(sent["created"] == 12);
    CHECK(sent["model"] == "m");
    CHECK(sent["object"] == "text_completion");
    CHECK(sent["choices"][0]["text"] == " a\"\u00e4");
    CHECK(sent["choices"][0]["finish_reason"].is_null());
  }

  TEST_CASE("a response without a usable token has a reason") {
    for (const std::string& bad :
         {std::string("no JSON"), std::string("{}"), std::string(R"({"choices":[]})"),
          std::string(R"({"choices":[{},{}]})"), std::string(R"({"choices":[5]})"),
          answer(R"("a")", R"("length")", "null"), answer(R"("a")", R"("length")", "[1,2]"),
          answer(R"("a")", R"("length")", R"(["1"])"),
          answer(R"("a")", R"("length")", "[1]", "null"),
          answer(R"("a")", R"("length")", "[1]", "[]")}) {
      CAPTURE(bad);
      CHECK(why_not(bad) == FirstToken::kNoToken);
    }
    CHECK(why_not(answer(R"("")")) == FirstToken::kText);
    CHECK(why_not(answer("null")) == FirstToken::kText);
    CHECK(why_not(answer(R"("a\ufffd")")) == FirstToken::kText);
    CHECK(why_not(answer("\"\xEF\xBF\xBD\"")) == FirstToken::kText);
    CHECK(why_not(answer(R"("a")", R"("stop")")) == FirstToken::kEnded);
  }

  TEST_CASE("the decode engine continues after the token") {
    FirstToken why = FirstToken::kNoToken;
    const auto token = read_first_token(answer(R"("a")"), why).value();
    const std::string body =
        R"({"model":"m","prompt":"x","top_p":0.90,"max\u005ftokens":5,"stream":true,)"
        R"("kv_transfer_params":{"evil":1}})";
    const auto members = read_members(body).value();
    const std::string sent = continued_body(members, token, R"({"pegaflow":{"job":1}})");
    CHECK(json::parse(sent) == json::parse(R"({"model":"m","prompt":[1,2,3,7],"top_p":0.90,)"
                                           R"("max_tokens":4,"stream":true,)"
                                           R"("kv_transfer_params":{"pegaflow":{"job":1}}})"));
    CHECK(sent.find("0.90") != std::string::npos);
    const json plain = json::parse(continued_body(read_members("{}").value(), token, ""));
    CHECK(plain == json::parse(R"({"max_tokens":15,"prompt":[1,2,3,7]})"));
  }

  TEST_CASE("usage is reported as if one engine had done all the work") {
    const std::string text =
        "data: {\"choices\":[{\"text\":\"\\\"prompt_tokens\\\"\"}]}\n\n"
        ": \"prompt_tokens\"\n\n"
        "data: {\"choices\":[],\"usage\": {\"prompt_tokens\": 101 ,\"total_tokens\":105,"
        "\"completion_tokens\":4,\"x\":1.50}}\r\n\r\n"
        "data: {\"usage\":{\"prompt_tokens\":null}}\n\ndata: {\"prompt_tokens\" broken\n\n"
        "data: [DONE]\n\n";
    const std::string wanted =
        "data: {\"choices\":[{\"text\":\"\\\"prompt_tokens\\\"\"}]}\n\n"
        ": \"prompt_tokens\"\n\n"
        "data: {\"choices\":[],\"usage\": {\"prompt_tokens\": 100 ,\"total_tokens\":105,"
        "\"completion_tokens\":5,\"x\":1.50}}\r\n\r\n"
        "data: {\"usage\":{\"prompt_tokens\":null}}\n\ndata: {\"prompt_tokens\" broken\n\n"
        "data: [DONE]\n\n";
    CHECK(with_first_token_counted(text) == wanted);
    CHECK(with_first_token_counted("").empty());
    CHECK(with_first_token_counted("data: x") == "data: x");
  }
}

}  // namespace
}  // namespace pegaflow::router
