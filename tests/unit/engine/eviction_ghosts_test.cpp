#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "base/clock.h"
#include "engine/eviction/ghosts.h"
#include "engine/eviction/policy_memory.h"
#include "engine/kept/kept_tables.h"

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

  TEST_CASE("a later process remembers the names added last, each with its uses and its age") {
    ManualClock clock;
    const auto tables =
        KeptTables::create({.pool = {1, 1}, .pool_bytes = std::uint64_t{1} << 20}, clock).value();
    const auto again = [&] {
      PolicyMemory memory(tables.policy(0));
      memory.begin(1);
      return EvictedBlocks::create(4096, memory).value();
    };
    // Fewer changes than the log has, then several times as many.
    for (const std::uint32_t count : {1'000U, 30'000U}) {
      EvictedBlocks evicted = again();
      for (std::uint32_t i = 1; i <= count; ++i) {
        evicted.add(name(i), 1 + i % EvictedBlocks::kMaxUses);
        if (i % 3 == 0) evicted.take(name(i - 1));
      }
      EvictedBlocks next = again();
      for (std::uint32_t i = count - 900; i <= count; ++i) {
        CAPTURE(i);
        const auto wanted = evicted.look(name(i));
        const auto found = next.look(name(i));
        REQUIRE(found.has_value() == wanted.has_value());
        if (!found) continue;
        CHECK(found->uses == wanted->uses);
        CHECK(found->evictions_since == wanted->evictions_since);
      }
    }
    PolicyMemory other(tables.policy(0));
    other.begin(2);
    CHECK_FALSE(EvictedBlocks::create(4096, other)->look(name(30'000)));
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
