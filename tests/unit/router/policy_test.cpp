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
  TEST_CASE("round robin takes turns, and a single candidate uses no turn") {
    const auto turns = policy("round-robin");
    const auto three = idle(3);
    CHECK(turns->choose(three, {}) == 0);
    CHECK(turns->choose(idle(1), {}) == 0);
    CHECK(turns->choose(three, {}) == 1);
    CHECK(turns->choose(three, {}) == 2);
    CHECK(turns->choose(three, {}) == 0);
  }

  TEST_CASE("least load takes the least loaded, and takes turns among equals") {
    const auto least = policy("least-load");
    const std::vector<Candidate> loaded = {{1, 5}, {2, 1}, {3, 4}};
    for (int i = 0; i < 5; ++i) CHECK(least->choose(loaded, {}) == 1);
    std::map<std::size_t, int> chosen;
    for (int i = 0; i < 30; ++i) ++chosen[least->choose(idle(3), {})];
    for (const auto& [index, times] : chosen) CHECK(times == 10);
    CHECK(chosen.size() == 3);
  }

  TEST_CASE("the less loaded of two is never the most loaded of all") {
    const auto two = policy("power-of-two");
    const std::vector<Candidate> loaded = {{1, 9}, {2, 1}, {3, 4}};
    std::map<std::size_t, int> chosen;
    for (int i = 0; i < 3000; ++i) ++chosen[two->choose(loaded, {})];
    CHECK(chosen.count(0) == 0);
    // The least loaded is one of the two in two of three draws.
    CHECK(chosen[1] > 1800);
    CHECK(chosen[2] > 800);
    CHECK(two->choose(idle(1), {}) == 0);
  }

  TEST_CASE("an affinity keeps its engine, and only the share of a removed engine moves") {
    const auto hash = policy("consistent-hash");
    const auto four = idle(4);
    const auto three = idle(3);
    std::map<std::size_t, int> chosen;
    int moved = 0;
    for (std::uint64_t key = 1; key <= 4000; ++key) {
      const std::size_t before = hash->choose(four, {.affinity = key});
      ++chosen[before];
      CHECK(hash->choose(four, {.affinity = key}) == before);
      const std::size_t after = hash->choose(three, {.affinity = key});
      if (before != 3) CHECK(after == before);
      moved += before == 3;
    }
    CHECK(moved > 800);
    CHECK(moved < 1200);
    CHECK(chosen.size() == 4);
  }

  TEST_CASE("a popular affinity overflows to the next engine") {
    const auto hash = policy("consistent-hash");
    auto loaded = idle(4);
    for (int i = 0; i < 400; ++i) ++loaded[hash->choose(loaded, {.affinity = 7})].inflight;
    for (const Candidate& each : loaded) CHECK(each.inflight <= 126);
    // Without an affinity: the least loaded.
    loaded[2].inflight = 0;
    CHECK(hash->choose(loaded, {}) == 2);
  }

  TEST_CASE("unknown names are rejected, and hashes are never 0") {
    CHECK(make_policy("best", 1).error().code == Errc::kInvalidArgument);
    CHECK(hash_key("") != 0);
    CHECK(hash_key("a") != hash_key("b"));
  }
}

}  // namespace
}  // namespace pegaflow::router
