#include "engine/eviction_weighted.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include <doctest/doctest.h>

#include "engine/eviction_ghosts.h"

namespace pegaflow {

namespace {

using Freed = EvictionPolicy::Freed;
constexpr std::uint32_t kRows = 1024;

std::uint32_t hash_of(std::uint32_t name) {
  const std::uint64_t mixed = (name + 1) * 0x9E3779B97F4A7C15ULL;
  return static_cast<std::uint32_t>(mixed >> 32U);
}

/// A full pool that names come into, one after the other.
struct Pool {
  Pool() : rows(std::move(*BlockRows::create(kRows))) {
    policy = std::move(*WeightedLruPolicy::create(*rows, kRows));
  }
  void come(std::uint32_t name) {
    std::uint32_t row = used;
    if (used < kRows) {
      ++used;
    } else {
      row = policy->victim();
      policy->freed(row, hash_of(names[row]), Freed::kEvicted);
    }
    names[row] = name;
    policy->sealed(row, hash_of(name));
    last = row;
  }
  void use(std::uint32_t row) {
    policy->taken(row);
    policy->rested(row);
  }
  double exponent() const { return dynamic_cast<WeightedLruPolicy&>(*policy).exponent(); }

  std::unique_ptr<BlockRows> rows;
  std::unique_ptr<EvictionPolicy> policy;
  std::uint32_t names[kRows] = {};
  std::uint32_t used = 0;
  [[nodiscard]] std::uint32_t note_of_last() const { return (*rows)[last].note; }
  std::uint32_t last = 0;
};

}  // namespace

TEST_SUITE("WeightedLruPolicy") {
  TEST_CASE("blocks used once that come back soon after they went make uses count less") {
    Pool pool;
    CHECK(pool.exponent() == 1);

    // Each name comes, goes, comes once more, and never again.
    std::uint32_t next = 0;
    std::deque<std::uint32_t> again;
    for (int i = 0; i < 20000; ++i) {
      if (again.size() > kRows * 5 / 4) {
        pool.come(again.front());
        again.pop_front();
      }
      again.push_back(next);
      pool.come(next++);
    }

    CHECK(pool.exponent() < 0.5);
    CHECK(pool.exponent() >= WeightedLruPolicy::kLeastExponent);
  }

  TEST_CASE("an evicted block that comes back has its former uses and one more") {
    Pool pool;
    pool.come(0);
    pool.use(pool.last);
    pool.use(pool.last);
    CHECK(pool.note_of_last() == 3);
    for (std::uint32_t name = 1; name < 8 * kRows; ++name) pool.come(name);

    pool.come(0);

    CHECK(pool.note_of_last() == 4);
  }

  TEST_CASE("a dropped block is forgotten") {
    Pool pool;
    pool.come(0);
    pool.policy->freed(pool.last, hash_of(0), Freed::kDropped);

    pool.policy->sealed(pool.last, hash_of(0));

    CHECK(pool.note_of_last() == 1);
  }

  TEST_CASE("a million rows cost 8 bytes each for what was evicted") {
    const auto rows = BlockRows::create(1'000'000);
    REQUIRE(rows);

    const auto policy = WeightedLruPolicy::create(**rows, 1'000'000);

    REQUIRE(policy);
    CHECK((*policy)->memory_bytes() == 8'000'000);
  }
}

TEST_SUITE("EvictedBlocks") {
  TEST_CASE("a name is found once, with its uses") {
    auto evicted = EvictedBlocks::create(64);
    REQUIRE(evicted);
    evicted->add(7, 5);

    const auto found = evicted->take(7);

    REQUIRE(found);
    CHECK(found->uses == 5);
    CHECK_FALSE(evicted->take(7));
    CHECK_FALSE(evicted->take(8));
  }

  TEST_CASE("about as many are known as there are entries, the last ones, and since when") {
    auto evicted = EvictedBlocks::create(4096);
    REQUIRE(evicted);
    CHECK(evicted->memory_bytes() == 4096 * 4);
    for (std::uint32_t name = 0; name < 20000; ++name) evicted->add(hash_of(name), 1);

    std::uint32_t recent = 0;
    for (std::uint32_t name = 18000; name < 20000; ++name) {
      const auto found = evicted->take(hash_of(name));
      if (!found) continue;
      ++recent;
      CHECK(found->evictions_since <= 2016);
      CHECK(found->evictions_since + 32 >= 19999 - name);
    }
    std::uint32_t old = 0;
    for (std::uint32_t name = 0; name < 8000; ++name) {
      old += evicted->take(hash_of(name)) ? 1 : 0;
    }

    CHECK(recent > 1990);
    CHECK(old < 40);
  }

  TEST_CASE("more entries than there is memory for are refused") {
    const auto evicted = EvictedBlocks::create(std::uint64_t{1} << 50);

    REQUIRE_FALSE(evicted);
    CHECK(evicted.error().code == Errc::kOutOfCapacity);
  }
}

}  // namespace pegaflow
