#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "engine/eviction/ghosts.h"

namespace pegaflow::engine {
namespace {

/// Each name falls into the one bucket of a memory of 16, and has a tag of its own.
std::uint32_t name(std::uint32_t number) { return number * 0x9E3779B9U; }

EvictedBlocks one_bucket() { return EvictedBlocks::create(16).value(); }

/// Returns the known ones among these numbers, which forgets them.
std::vector<std::uint32_t> take_all(EvictedBlocks& evicted, std::uint32_t first,
                                    std::uint32_t last) {
  std::vector<std::uint32_t> known;
  for (std::uint32_t i = first; i <= last; ++i) {
    if (evicted.take(name(i))) known.push_back(i);
  }
  return known;
}

TEST_SUITE("evicted blocks") {
  TEST_CASE("an added name is known once, with its uses and its age") {
    EvictedBlocks evicted = one_bucket();
    evicted.add(name(1), 3);
    evicted.add(name(2), EvictedBlocks::kMaxUses);

    const auto first = evicted.take(name(1));
    const auto second = evicted.take(name(2));

    REQUIRE(first);
    CHECK(first->uses == 3);
    CHECK(first->evictions_since == 1);
    REQUIRE(second);
    CHECK(second->uses == EvictedBlocks::kMaxUses);
    CHECK(second->evictions_since == 0);
    CHECK_FALSE(evicted.take(name(1)));
    CHECK_FALSE(evicted.take(name(3)));
  }

  TEST_CASE("in a full bucket a new name replaces the oldest") {
    EvictedBlocks evicted = one_bucket();
    for (std::uint32_t i = 1; i <= 18; ++i) evicted.add(name(i), 1);

    CHECK(take_all(evicted, 1, 2).empty());
    CHECK(take_all(evicted, 3, 18).size() == 16);
  }

  TEST_CASE("a free entry is used before any other") {
    EvictedBlocks evicted = one_bucket();
    for (std::uint32_t i = 1; i <= 16; ++i) evicted.add(name(i), 1);
    REQUIRE(evicted.take(name(1)));
    REQUIRE(evicted.take(name(16)));

    evicted.add(name(17), 1);
    evicted.add(name(18), 1);

    CHECK(take_all(evicted, 1, 18).size() == 16);
  }

  TEST_CASE("ages are right when their count wraps around") {
    EvictedBlocks evicted = one_bucket();
    for (std::uint32_t i = 1; i <= 4100; ++i) evicted.add(name(i), 1);

    const auto oldest = evicted.take(name(4085));
    REQUIRE(oldest);
    CHECK(oldest->evictions_since == 15);
    CHECK_FALSE(evicted.take(name(4084)));
  }
}

}  // namespace
}  // namespace pegaflow::engine
