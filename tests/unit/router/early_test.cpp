#include <chrono>
#include <string>
#include <string_view>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "router/body/early_params.h"
#include "router/routing/early_watch.h"

namespace pegaflow::router {
namespace {

constexpr std::string_view kNode = "00112233445566778899aabbccddeeff";
constexpr std::string_view kLife = "ffeeddccbbaa99887766554433221100";

std::string report(std::string_view job, std::string_view more) {
  return fmt::format(R"({{"pegaflow": {{"node":"{}","incarnation":"{}","job":{},"tokens":9{}}}}})",
                     kNode, kLife, job, more);
}

TEST_SUITE("early_params") {
  TEST_CASE("the place of an engine is in the report that allows early requests") {
    const auto place = place_of(report("17", R"(, "early": true)"));

    REQUIRE(place);
    CHECK(place->node == kNode);
    CHECK(place->incarnation == kLife);
    CHECK(place->job == 17);
  }

  TEST_CASE("a report without that permission, or an invalid one, has no place") {
    for (const std::string& text :
         {report("17", ""), report("17", R"(,"early":false)"), report("17", R"(,"early":"true")"),
          report("-1", R"(,"early":true)"), report("1.5", R"(,"early":true)"),
          report("4611686018427387904", R"(,"early":true)"), report("\"7\"", R"(,"early":true)"),
          report("17", R"(,"early":true,"node":"n-1")"),
          report("17", R"(,"early":true,"incarnation":null)"), std::string(R"({"pegaflow":[]})"),
          std::string(R"({"pegaflow":{"early":true}})"), std::string("{}"), std::string("["),
          std::string()}) {
      CAPTURE(text);
      CHECK_FALSE(place_of(text));
    }
  }

  TEST_CASE("a decode engine receives the next job and the time limit") {
    const PrefillPlace place{
        .node = std::string(kNode), .incarnation = std::string(kLife), .job = 3};

    CHECK(
        early_params(place, std::chrono::milliseconds(32'750)) ==
        fmt::format(
            R"({{"pegaflow":{{"node":"{}","incarnation":"{}","job":4,"tokens":0,"wait_ms":32750}}}})",
            kNode, kLife));
    // 0 would be a request that came after its prefill.
    CHECK(early_params(place, std::chrono::milliseconds(0)).find(R"("wait_ms":1})") !=
          std::string::npos);
  }
}

TEST_SUITE("EarlyWatch") {
  PrefillPlace at(std::uint64_t job, std::string_view life = kLife) {
    return {.node = std::string(kNode), .incarnation = std::string(life), .job = job};
  }

  TEST_CASE("no place is known before an answer and after a failure") {
    EarlyWatch watch;
    CHECK(watch.place(TimePoint()) == nullptr);
    watch.learn(at(4));
    REQUIRE(watch.place(TimePoint()) != nullptr);
    watch.forget();
    CHECK(watch.place(TimePoint()) == nullptr);
    watch.learn(at(4));
    watch.learn({});
    CHECK(watch.place(TimePoint()) == nullptr);
  }

  TEST_CASE("jobs rise within the life of an engine") {
    EarlyWatch watch;
    watch.learn(at(4));
    watch.learn(at(0));  // Answers overtake each other, and a cached prompt has no job.
    CHECK(watch.place(TimePoint())->job == 4);
    watch.learn(at(1, kNode));
    CHECK(watch.place(TimePoint())->job == 1);
  }

  TEST_CASE("an engine whose schedulers answer in turn has no place, a restarted one has") {
    EarlyWatch watch;
    watch.learn(at(4));
    watch.learn(at(1, kNode));
    CHECK(watch.place(TimePoint()) != nullptr);
    watch.learn(at(5));
    CHECK(watch.place(TimePoint()) == nullptr);
  }

  TEST_CASE("three schedulers that answer in turn are recognized, with failures between them") {
    constexpr std::string_view kThird = "0123456789abcdef0123456789abcdef";
    EarlyWatch watch;
    for (const std::string_view life : {kLife, kNode, kThird}) {
      watch.learn(at(4, life));
      REQUIRE(watch.place(TimePoint()) != nullptr);
      watch.forget();
    }
    watch.learn(at(5));
    CHECK(watch.place(TimePoint()) == nullptr);
    watch.forget();
    watch.learn(at(6));
    CHECK(watch.place(TimePoint()) == nullptr);
    watch.restarted();
    watch.learn(at(7));
    CHECK(watch.place(TimePoint()) != nullptr);
  }

  TEST_CASE("after a late response the engine is left out for a minute") {
    EarlyWatch watch;
    watch.learn(at(4));
    const TimePoint now{std::chrono::hours(1)};
    watch.was_late(now);
    watch.learn(at(5));
    CHECK(watch.place(now + EarlyWatch::kPause - std::chrono::milliseconds(1)) == nullptr);
    REQUIRE(watch.place(now + EarlyWatch::kPause) != nullptr);
    CHECK(watch.place(now + EarlyWatch::kPause)->job == 5);
  }
}

}  // namespace
}  // namespace pegaflow::router
