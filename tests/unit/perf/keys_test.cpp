#include "perf/lib/keys.h"

#include <set>

#include <doctest/doctest.h>

namespace pegaflow::perf {
namespace {

TEST_SUITE("keys") {
  TEST_CASE("keys differ from each other and repeat with their seed") {
    const KeySource source(1);
    std::set<BlockKey> seen;
    for (std::uint64_t i = 0; i < 20'000; ++i) seen.insert(source.key(i));
    CHECK(seen.size() == 20'000);
    CHECK(KeySource(1).key(77) == source.key(77));
    CHECK(KeySource(2).key(77) != source.key(77));
  }

  TEST_CASE("a range is the keys of their numbers, in order") {
    const KeySource source(3);
    const std::vector<BlockKey> keys = source.range(10, 5);
    REQUIRE(keys.size() == 5);
    for (std::uint64_t i = 0; i < 5; ++i) CHECK(keys[i] == source.key(10 + i));
  }

  TEST_CASE("drawn keys belong to the population, and each draw differs") {
    const KeySource source(4);
    std::set<BlockKey> population;
    for (std::uint64_t i = 0; i < 100; ++i) population.insert(source.key(i));
    const std::vector<BlockKey> first = source.drawn(100, 50, 0);
    for (const BlockKey& key : first) CHECK(population.contains(key));
    CHECK(first != source.drawn(100, 50, 1));
    CHECK(first == source.drawn(100, 50, 0));
  }
}

}  // namespace
}  // namespace pegaflow::perf
