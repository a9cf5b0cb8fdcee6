#include "router/http/json_text.h"

#include <optional>
#include <random>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/support/seed.h"

namespace pegaflow::router {
namespace {

/// The verdict of another parser; none on numbers that no double can hold.
std::optional<bool> is_object_elsewhere(const std::string& text) {
  try {
    return nlohmann::json::parse(text).is_object();
  } catch (const nlohmann::json::out_of_range&) {
    return std::nullopt;
  } catch (const nlohmann::json::parse_error&) {
    return false;
  }
}

TEST_SUITE("JSON text") {
  TEST_CASE("members are spans of the text, exactly as written") {
    const std::string text = " { \"a\" : 1.50e+3 ,\"b\":[1, {\"c\":null}],\"a\":\"x\\\"y\" } ";
    const auto members = read_members(text).value();

    REQUIRE(members.size() == 3);
    CHECK(members[0].raw_key == "a");
    CHECK(members[0].value == "1.50e+3");
    CHECK(members[0].whole == "\"a\" : 1.50e+3");
    CHECK(members[1].value == "[1, {\"c\":null}]");
    CHECK(find_member(members, "a")->value == "\"x\\\"y\"");  // The last one counts.
    CHECK(find_member(members, "c") == nullptr);
  }

  TEST_CASE("keys are compared with their escapes undone") {
    const std::string text = R"({"max\u005ftokens":1,"\"":2})";
    const auto members = read_members(text).value();
    CHECK(members[0].is("max_tokens"));
    CHECK_FALSE(members[0].is("max\\u005ftokens"));
    CHECK(members[1].is("\""));
  }

  TEST_CASE("strings lose their escapes") {
    CHECK(json_unescape(R"("a\n\u00e4\ud83d\ude00\/")") == "a\n\xC3\xA4\xF0\x9F\x98\x80/");
    CHECK(json_unescape(R"("\ud83d")") ==
          "\xEF\xBF\xBD");  // Half of a surrogate pair has no UTF-8.
    CHECK(json_unescape("12").empty());
    CHECK(json_quote("a\"\\\n\xFF") == "\"a\\\"\\\\\\u000a\xEF\xBF\xBD\"");
  }

  TEST_CASE("arrays return their elements") {
    CHECK(read_elements(" [1 ,[2,3], {\"a\":4}] ").value() ==
          std::vector<std::string_view>{"1", "[2,3]", "{\"a\":4}"});
    CHECK(read_elements("[]").value().empty());
    CHECK(read_elements("{}").error().code == Errc::kInvalidArgument);
    CHECK(read_elements("[1] 2").error().code == Errc::kInvalidArgument);
    CHECK(read_elements("[1,]").error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("text that is not JSON is rejected with the position") {
    for (const char* const bad : {"",
                                  "[]",
                                  "{",
                                  "{\"a\"}",
                                  "{\"a\":}",
                                  "{\"a\":1,}",
                                  "{a:1}",
                                  "{\"a\":01}",
                                  "{\"a\":1.}",
                                  "{\"a\":-}",
                                  "{\"a\":1e}",
                                  "{\"a\":nul}",
                                  "{\"a\":NaN}",
                                  "{\"a\":\"\\x\"}",
                                  "{\"a\":\"\\u12\"}",
                                  "{\"a\":\"\t\"}",
                                  "{\"a\":1}x",
                                  "{\"a\":[1}",
                                  "{\"a\":\"\xC0\x80\"}",
                                  "{\"a\":\"\xED\xA0\x80\"}",
                                  "{\"a\":\"\xF5\x80\x80\x80\"}",
                                  "{\"a\":\"\xE4\"}"}) {
      CAPTURE(bad);
      const auto read = read_members(bad);
      REQUIRE_FALSE(read);
      CHECK(read.error().code == Errc::kInvalidArgument);
      CHECK(read.error().detail.find("at byte") != std::string::npos);
    }
    std::string deep = "{\"a\":" + std::string(kJsonDepth + 1, '[');
    deep += std::string(kJsonDepth + 1, ']') + "}";
    CHECK_FALSE(read_members(deep));
    std::string wide = "{\"a\":1";
    for (std::size_t i = 1; i < kJsonMembers; ++i) wide += ",\"a\":1";
    CHECK(read_members(wide + "}").value().size() == kJsonMembers);
    CHECK_FALSE(read_members(wide + ",\"a\":1}"));
  }

  TEST_CASE("it accepts the same texts as another parser") {
    // Random edits of a text with everything in it.
    std::mt19937_64 random(testing::seed());
    const std::string whole =
        R"({"a":[1,-2.5e-3,0],"b":{"c":"x\u00e4\n\"","d":[]},"e":true,"f":null,"ä":{}})";
    const std::string bytes = "{}[]\",:\\u0123eE+-. \n\tntf\xC3\xA4\xFF";
    for (int round = 0; round < 20'000; ++round) {
      std::string text = whole;
      for (std::uint64_t edits = random() % 3 + 1; edits > 0; --edits) {
        const std::size_t at = random() % text.size();
        switch (random() % 3) {
          case 0:
            text[at] = bytes[random() % bytes.size()];
            break;
          case 1:
            text.erase(at, random() % 3 + 1);
            break;
          default:
            text.insert(at, 1, bytes[random() % bytes.size()]);
        }
        if (text.empty()) text = "{";
      }
      CAPTURE(text);
      const std::optional<bool> other = is_object_elsewhere(text);
      if (other) REQUIRE(read_members(text).has_value() == *other);
    }
  }
}

}  // namespace
}  // namespace pegaflow::router
