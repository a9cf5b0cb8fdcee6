#include "router/routing/policy.h"

#include <map>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

namespace pegaflow::router {
namespace {

std::unique_ptr<Policy> policy(const char* name) {
  return std::move(make_policy(name, testing::seed()).value());
}

std::vector<Candidate> idle(std::size_t count) {
  std::vector<Candidate> candidates;
  for (std::size_t i = 0; i < count; ++i) candidates.push_back({hash_key(std::to_string(i)), 0});
  return candidates;
}

TEST_SUITE("policies") {
  TEST_CASE("round robin takes turns, and no turn where there is no choice") {
    const auto turns = policy("round-robin");
    const auto three = idle(3);
    CHECK(turns->choose(three, 0) == 0);
    CHECK(turns->choose(idle(1), 0) == 0);
    CHECK(turns->choose(three, 0) == 1);
    CHECK(turns->choose(three, 0) == 2);
    CHECK(turns->choose(three, 0) == 0);
  }

  TEST_CASE("least load takes the least loaded, and turns among equals") {
    const auto least = policy("least-load");
    const std::vector<Candidate> loaded = {{1, 5}, {2, 1}, {3, 4}};
    for (int i = 0; i < 5; ++i) CHECK(least->choose(loaded, 0) == 1);
    std::map<std::size_t, int> chosen;
    for (int i = 0; i < 30; ++i) ++chosen[least->choose(idle(3), 0)];
    for (const auto& [index, times] : chosen) CHECK(times == 10);
    CHECK(chosen.size() == 3);
  }

  TEST_CASE("the less loaded of two never is the most loaded of all") {
    const auto two = policy("power-of-two");
    const std::vector<Candidate> loaded = {{1, 9}, {2, 1}, {3, 4}};
    std::map<std::size_t, int> chosen;
    for (int i = 0; i < 3000; ++i) ++chosen[two->choose(loaded, 0)];
    CHECK(chosen.count(0) == 0);
    // The least loaded is among the two in two of three draws.
    CHECK(chosen[1] > 1800);
    CHECK(chosen[2] > 800);
    CHECK(two->choose(idle(1), 0) == 0);
  }

  TEST_CASE("a key keeps its engine, and only the share of one that goes moves") {
    const auto hash = policy("consistent-hash");
    const auto four = idle(4);
    const auto three = idle(3);
    std::map<std::size_t, int> chosen;
    int moved = 0;
    for (std::uint64_t key = 1; key <= 4000; ++key) {
      const std::size_t before = hash->choose(four, key);
      ++chosen[before];
      CHECK(hash->choose(four, key) == before);
      const std::size_t after = hash->choose(three, key);
      if (before != 3) CHECK(after == before);
      moved += before == 3;
    }
    CHECK(moved > 800);
    CHECK(moved < 1200);
    CHECK(chosen.size() == 4);
  }

  TEST_CASE("a popular key overflows to the next engine instead of piling up") {
    const auto hash = policy("consistent-hash");
    auto loaded = idle(4);
    for (int i = 0; i < 400; ++i) ++loaded[hash->choose(loaded, 7)].inflight;
    for (const Candidate& each : loaded) CHECK(each.inflight <= 126);
    // Without a key the least loaded.
    loaded[2].inflight = 0;
    CHECK(hash->choose(loaded, 0) == 2);
  }

  TEST_CASE("names that are none are refused, and keys are never 0") {
    CHECK(make_policy("best", 1).error().code == Errc::kInvalidArgument);
    CHECK(hash_key("") != 0);
    CHECK(hash_key("a") != hash_key("b"));
  }
}

}  // namespace
}  // namespace pegaflow::router
