#include "router/body/cache_salt.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "router/body/request_body.h"

namespace pegaflow::router {
namespace {

using nlohmann::json;

const CacheSalts kSalts("a secret of some bytes");
const Tenant kAnn{kSalts, "ann"};
const std::string kJson = "application/json";

/// The body with `salt` for what the router writes, so that a test can name it.
std::string with(std::string body, const std::string& salt) {
  for (std::size_t at = 0; (at = body.find('$', at)) != std::string::npos;) {
    body.replace(at, 1, salt);
  }
  return body;
}

TEST_SUITE("CacheSalts") {
  TEST_CASE("a salt depends on the secret, the tenant and the client's salt, and on nothing else") {
    std::set<std::string> salts;
    for (const char* const secret : {"", "one secret of bytes", "another secret of bytes"}) {
      const CacheSalts one(secret);
      const CacheSalts same(secret);
      for (const auto& [tenant, own] : std::initializer_list<std::pair<const char*, const char*>>{
               {"ann", ""}, {"bob", ""}, {"ann", "x"}, {"annx", ""}, {"an", "nx"}, {"", "ann"}}) {
        const std::string salt = one.salt(tenant, own);
        CHECK(salt == same.salt(tenant, own));
        CHECK(salts.insert(salt).second);
        // vLLM accepts at most 128 characters, none of @, /, \ and NUL.
        CHECK(salt.size() == 64);
        CHECK(std::all_of(salt.begin(), salt.end(),
                          [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }));
      }
    }
    CHECK(salts.size() == 18);
  }

  TEST_CASE("salts stay the same from release to release") {
    // A changed derivation would lose every cached prompt of every tenant. BLAKE2b, computed with
    // Python's hashlib.
    CHECK(CacheSalts("").salt("ann", "") ==
          "d551b62e561aeafc0f41a01d5e79c79be70ede8badd5f5b4a6e26640349ecdeb");
    CHECK(CacheSalts("0123456789abcdef").salt("ann", "x") ==
          "ced5e32a63ad83ebc1f23f2b04f64204e5c0ea98ea9f5a9339c6345550cab6f6");
  }

  TEST_CASE("an object receives the tenant's salt first, and its members stay valid") {
    const std::string salt = kSalts.salt("ann", "");
    for (const auto& [body, wanted] : std::initializer_list<std::pair<const char*, const char*>>{
             {R"({})", R"({"cache_salt":"$"})"},
             {R"( { } )", R"( {"cache_salt":"$" } )"},
             {R"({"a":1.0})", R"({"cache_salt":"$","a":1.0})"},
             {R"( { "model" : "m" , "b":[{"cache_salt":"x"}] })",
              R"( {"cache_salt":"$", "model" : "m" , "b":[{"cache_salt":"x"}] })"},
             {R"({"cache_salt":null,"a":1})", R"({"cache_salt":"$","a":1})"},
         }) {
      CAPTURE(body);
      std::string text = body;
      auto members = read_members(text).value();
      REQUIRE(set_cache_salt(text, members, kAnn));
      CHECK(text == with(wanted, salt));
      const auto read = read_members(text).value();
      REQUIRE(members.size() == read.size());
      for (std::size_t i = 0; i < members.size(); ++i) {
        CHECK(members[i].raw_key.data() == read[i].raw_key.data());
        CHECK(members[i].raw_key == read[i].raw_key);
        CHECK(members[i].value.data() == read[i].value.data());
        CHECK(members[i].value == read[i].value);
        CHECK(members[i].whole.data() == read[i].whole.data());
        CHECK(members[i].whole == read[i].whole);
      }
    }
  }

  TEST_CASE("a client's salt is mixed in, with its escapes undone") {
    const std::string salt = kSalts.salt("ann", "x/y");
    for (const char* const body :
         {R"({"a":1,"cache_salt":"x/y"})", R"({"cache_\u0073alt":"x\/\u0079"})",
          R"({"cache_salt":"x","cache_salt":"x/y"})",
          R"({"cache_salt":null,"cache_salt":"x/y"})"}) {
      CAPTURE(body);
      std::string text = body;
      auto members = read_members(text).value();
      REQUIRE(set_cache_salt(text, members, kAnn));
      CHECK(json::parse(text)["cache_salt"] == salt);
      CHECK(json_unescape(find_member(members, "cache_salt")->value) == salt);
    }
  }

  TEST_CASE("a salt that vLLM would not accept is refused") {
    for (const char* const value : {"1", "\"\"", "[]", "{}", "true"}) {
      CAPTURE(value);
      for (const char* const before : {"", R"("cache_salt":"x",)"}) {
        std::string text = std::string("{") + before + R"("cache_salt":)" + value + "}";
        auto members = read_members(text).value();
        const auto set = set_cache_salt(text, members, kAnn);
        REQUIRE_FALSE(set);
        CHECK(set.error().code == Errc::kInvalidArgument);
      }
    }
  }

  TEST_CASE("for paths of --pass each salt is replaced, at every depth") {
    const std::string salt = kSalts.salt("ann", "");
    const std::string folded = kSalts.salt("ann", "x");
    for (const auto& [body, wanted] : std::initializer_list<std::pair<const char*, const char*>>{
             {R"({})", R"({"cache_salt":"$"})"},
             {R"({"a":{"cache_salt":"x"}})", R"({"cache_salt":"$","a":{"cache_salt":"#"}})"},
             {R"({"cache_salt":"x","a":[{"cache_salt":null}]})",
              R"({"cache_salt":"#","a":[{"cache_salt":"$"}]})"},
             {R"([{"cache_salt":"x"},1])", R"([{"cache_salt":"#"},1])"},
             {R"({"cache_salt":{"type":"cache_salt"}})", R"({"cache_salt":{"type":"cache_salt"}})"},
             {"12", "12"},
         }) {
      CAPTURE(body);
      std::string text = body;
      REQUIRE(set_cache_salt_anywhere(text, kAnn));
      std::string expected = with(wanted, salt);
      for (std::size_t at = 0; (at = expected.find('#', at)) != std::string::npos;) {
        expected.replace(at, 1, folded);
      }
      CHECK(text == expected);
    }
    std::string bad = "{";
    CHECK_FALSE(set_cache_salt_anywhere(bad, kAnn));
  }

  TEST_CASE("bodies are salted as their route requires") {
    std::string known = R"({"kv_transfer_params":{},"model":"m"})";
    const auto reading = read_request_body(known, BodyKind::kJson, &kJson, &kAnn).value();
    CHECK(known == with(R"({"cache_salt":"$","model":"m"})", kSalts.salt("ann", "")));
    CHECK(reading.model == "m");
    CHECK(reading.lost_steering);

    std::string passed = R"([{"kv_hints":1,"cache_salt":"x"}])";
    REQUIRE(read_request_body(passed, BodyKind::kUnknown, &kJson, &kAnn));
    CHECK(passed == with(R"([{"cache_salt":"$"}])", kSalts.salt("ann", "x")));

    // Bodies that are not JSON, and all bodies without a tenant, stay unchanged.
    const std::string audio = "audio/wav";
    for (const char* const body : {"", "RIFF", R"({"cache_salt":"x"})"}) {
      CAPTURE(body);
      std::string text = body;
      REQUIRE(read_request_body(text, BodyKind::kUnknown, &audio, &kAnn));
      CHECK(text == body);
      if (text.empty() || text.front() != '{') {
        REQUIRE(read_request_body(text, BodyKind::kUnknown, nullptr, &kAnn));
      } else {
        REQUIRE(read_request_body(text, BodyKind::kJson, &kJson));
      }
      CHECK(text == body);
    }
  }
}

}  // namespace
}  // namespace pegaflow::router
