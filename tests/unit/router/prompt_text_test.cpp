#include "router/body/prompt_text.h"

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

PromptText text_of(std::string_view route, std::string_view body) {
  const auto members = read_members(body);
  REQUIRE_MESSAGE(members, body);
  return prompt_text(route, *members);
}

TEST_SUITE("prompt_text") {
  TEST_CASE("the next turn of a conversation begins with the whole text of the last one") {
    const PromptText first =
        text_of("chat", R"({"model":"m","messages":[{"role":"user","content":"one"} ]})");
    const PromptText second = text_of(
        "chat",
        R"({"messages":[{"role":"user","content":"one"},{"role":"assistant","content":"two"}],
            "temperature":0.5,"model":"m","stream":true,"max_tokens":7})");
    CHECK(first.root != 0);
    CHECK(first.root == second.root);
    CHECK(first.text == R"([{"role":"user","content":"one"})");
    CHECK(second.text.substr(0, first.text.size()) == first.text);
    const PromptText completion = text_of("completions", R"({"prompt":"some words"})");
    CHECK(completion.text == "\"some words");
  }

  TEST_CASE(
      "tools and the system prompt come before the messages, wherever the client wrote them") {
    const PromptText got = text_of(
        "messages",
        R"({"messages":[{"role":"user","content":"q"}],"system":"s","tools":[{"name":"t"}]})");
    CHECK(got.text == "[{\"name\":\"t\"}]\n\"s\"\n[{\"role\":\"user\",\"content\":\"q\"}");
    const PromptText answer =
        text_of("responses", R"({"input":"q","instructions":"s","tools":null})");
    CHECK(answer.text == "\"s\"\n\"q");
  }

  TEST_CASE("what may change the whole prompt is part of the root, and sampling is not") {
    const auto root = [](std::string_view members) {
      const std::string body =
          R"({"model":"m","messages":[{"role":"user","content":"q"}])" + std::string(members) + "}";
      return text_of("chat", body).root;
    };
    const std::uint64_t plain = root("");
    for (const std::string_view same :
         {R"(,"temperature":1)", R"(,"n":2)", R"(,"user":"u")", R"(,"vllm_xargs":{"a":1})",
          R"(,"stop":["x"])", R"(,"session_id":"s")", R"(,"tools":[])"}) {
      CAPTURE(same);
      CHECK(root(same) == plain);
    }
    for (const std::string_view other :
         {R"(,"cache_salt":"a")", R"(,"chat_template":"t")", R"(,"tool_choice":"none")",
          R"(,"chat_template_kwargs":{"thinking":true})", R"(,"unknown_member":1)",
          R"(,"reasoning_effort":"low")"}) {
      CAPTURE(other);
      CHECK(root(other) != plain);
    }
    CHECK(root(R"(,"cache_salt":"a")") != root(R"(,"cache_salt":"b")"));
    CHECK(text_of("completions", R"({"prompt":"q"})").root !=
          text_of("completions", R"({"prompt":"q","model":"m"})").root);
    CHECK(text_of("chat", R"({"a":"1","b":"2","messages":[]})").root ==
          text_of("chat", R"({"b":"2","a":"1","messages":[]})").root);
    CHECK(text_of("chat", R"({"a":"12","b":"","messages":[]})").root !=
          text_of("chat", R"({"a":"1","b":"2","messages":[]})").root);
  }

  TEST_CASE("a prompt of token ids is read, and several prompts are none") {
    const PromptText ids = text_of("completions", R"({"prompt":[1, 20,4294967295]})");
    CHECK(ids.tokens == std::vector<std::uint32_t>{1, 20, 4294967295});
    CHECK(ids.text == "[1, 20,4294967295");
    CHECK(ids.root != 0);
    CHECK(text_of("completions", "{\"prompt\":[ 1 ,\n\t2 ] }").tokens ==
          std::vector<std::uint32_t>{1, 2});
    CHECK(text_of("completions", R"({"prompt":[[1,2]]})").tokens ==
          std::vector<std::uint32_t>{1, 2});
    CHECK(text_of("completions", R"({"prompt":["one"]})").text == "\"one");
    for (const std::string_view none :
         {R"({"prompt":["one","two"]})", R"({"prompt":[[1],[2]]})", R"({"prompt":[]})",
          R"({"prompt":[["one"]]})", R"({"prompt":[[[1]]]})", R"({"prompt":[1,-2]})",
          R"({"prompt":[1.5]})", R"({"prompt":4})", R"({"prompt":null})",
          R"({"prompt":[4294967296]})", R"({"prompt_embeds":"AA","prompt":"x"})", R"({})"}) {
      CAPTURE(none);
      const PromptText got = text_of("completions", none);
      CHECK(got.root == 0);
      CHECK(got.text.empty());
      CHECK(got.tokens.empty());
    }
    CHECK(text_of("embeddings", R"({"input":"q"})").root == 0);
    CHECK(text_of("chat", R"({"prompt":"q"})").root == 0);
  }

  TEST_CASE("token ids of any length are read, with any blanks between them") {
    const auto tokens = [](std::string_view list) {
      return text_of("completions", R"({"prompt":)" + std::string(list) + "}").tokens;
    };
    using Ids = std::vector<std::uint32_t>;
    CHECK(tokens("[0,9,10,99,100,128000,1234567,12345678,4294967295,7]") ==
          Ids{0, 9, 10, 99, 100, 128'000, 1'234'567, 12'345'678, 4'294'967'295, 7});
    CHECK(tokens("[ 1 ,\n\t22,  333 ]") == Ids{1, 22, 333});
    CHECK(tokens("[1]") == Ids{1});
    std::string list = "[0";
    Ids wanted = {0};
    for (std::uint32_t id = 1; id < 4'000'000'000U; id = id * 3 + 7) {
      list += (id % 2 == 0 ? "," : ", ") + std::to_string(id);
      wanted.push_back(id);
      if (id > 1'300'000'000U) break;
    }
    CHECK(tokens(list + "]") == wanted);
    for (const std::string_view none :
         {"[]", "[-1]", "[1,-2,3,4,5,6,7,8]", "[1.5,2,3,4,5,6]", "[1e3]", "[4294967296]",
          "[1,null]", "[12345678901234567890]", "[true]", "[1,[2]]", "[1,\"a\"]"}) {
      CAPTURE(none);
      CHECK(tokens(none).empty());
    }
  }

  TEST_CASE("token ids are the whole prompt, unless the engine shall cut them") {
    const PromptText ids =
        text_of("completions", R"({"model":"m","prompt":[3,4],"cache_salt":"t\u00e9"})");
    CHECK(ids.is_exact);
    CHECK(ids.cache_salt == "t\u00e9");
    CHECK(text_of("completions", R"({"prompt":[3],"truncate_prompt_tokens":null})").is_exact);
    CHECK(!text_of("completions", R"({"prompt":[3,4],"truncate_prompt_tokens":1})").is_exact);
    CHECK(!text_of("completions", R"({"prompt":"words"})").is_exact);
  }

  TEST_CASE("token ids are not the whole prompt beside a member that may change their blocks") {
    for (const char* const member :
         {R"("lora_name":"a")", R"("lora_path":"/a")", R"("lora_request":{"lora_name":"a"})",
          R"("features":{"mm_hashes":{"image":["h"]}})", R"("multi_modal_data":{"image":"data:,"})",
          R"("mm_processor_kwargs":{"size":3})", R"("multi_modal_uuids":["u"])",
          R"("a member of the future":1)"}) {
      CAPTURE(member);
      const auto text =
          text_of("completions", R"({"model":"m","prompt":[3,4],)" + std::string(member) + "}");
      CHECK(text.tokens.size() == 2);
      CHECK(!text.is_exact);
    }
    CHECK(text_of("completions",
                  R"({"model":"m","prompt":[3,4],"stream":true,"max_tokens":3,"echo":false,)"
                  R"("lora_name":null,"cache_salt":"t","response_format":{"type":"text"}})")
              .is_exact);
  }
}

}  // namespace
}  // namespace pegaflow::router
