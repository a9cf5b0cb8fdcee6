#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include <doctest/doctest.h>

#include "engine/eviction/ghosts.h"
#include "engine/eviction/weighted.h"

namespace pegaflow::engine {

namespace {

using Freed = EvictionPolicy::Freed;
constexpr std::uint32_t kRows = 1024;

std::uint32_t hash_of(std::uint32_t name) {
  const std::uint64_t mixed = (name + 1) * 0x9E3779B97F4A7C15ULL;
  return static_cast<std::uint32_t>(mixed >> 32U);
}

/// A full pool that receives names one after the other.
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
      const double before = exponent();
      policy->freed(row, hash_of(names[row]), Freed::kEvicted);
      ++evictions;
      if (exponent() != before) {
        greatest_step = std::max(greatest_step, std::abs(exponent() - before));
        evictions_of_step = std::min(evictions_of_step, evictions);
        evictions = 0;
      }
    }
    names[row] = name;
    policy->sealed(row, hash_of(name));
    last = row;
  }
  void use(std::uint32_t row) {
    policy->taken(row);
    policy->released(row);
  }
  void come_or_use(std::uint32_t name) {
    const auto* const found = std::find(names, names + used, name);
    found == names + used ? come(name) : use(static_cast<std::uint32_t>(found - names));
  }
  /// Each name is saved, saved once more after some time, and never again.
  void play_once_more(int count) {
    std::multimap<std::uint64_t, std::uint32_t> due;
    for (int i = 0; i < count; ++i) {
      const std::uint64_t now = rows->uses();
      if (!due.empty() && due.begin()->first <= now) {
        come_or_use(due.begin()->second);
        due.erase(due.begin());
        continue;
      }
      // Some while they are still present, most when they have just been evicted, however long they
      // stayed.
      due.emplace(now + kRows / 4 + hash_of(next) % (2 * kRows), next);
      come_or_use(next++);
    }
  }
  /// Names that recur in turn, too many for the pool, among others that are saved once.
  void play_loop(int count, std::uint32_t names_of_loop = kRows * 7 / 6) {
    const std::uint32_t first = next;
    next += names_of_loop;
    for (int i = 0; i < count; ++i) {
      come_or_use(i % 2 == 0 ? first + static_cast<std::uint32_t>(i / 2) % names_of_loop : next++);
    }
  }
  [[nodiscard]] std::uint32_t note_of_last() const { return (*rows)[last].note; }
  double exponent() const { return dynamic_cast<WeightedLruPolicy&>(*policy).exponent(); }

  std::unique_ptr<BlockRows> rows;
  std::unique_ptr<EvictionPolicy> policy;
  std::uint32_t names[kRows] = {};
  std::uint32_t used = 0;
  std::uint32_t last = 0;
  std::uint32_t next = 0;  ///< Names from here on are new.
  // How the exponent moved.
  double greatest_step = 0;
  std::uint32_t evictions = 0;  ///< Since the exponent moved.
  std::uint32_t evictions_of_step = ~std::uint32_t{0};
};

}  // namespace

TEST_SUITE("WeightedLruPolicy") {
  TEST_CASE("blocks used once that return soon after their eviction make uses count less") {
    Pool pool;
    CHECK(pool.exponent() == 1);

    pool.play_once_more(20000);

    CHECK(pool.exponent() < 0.5);
    CHECK(pool.exponent() >= WeightedLruPolicy::kLeastExponent);
  }

  TEST_CASE("blocks used often that return soon after their eviction make uses count more") {
    Pool pool;

    pool.play_loop(40000);

    CHECK(pool.exponent() == WeightedLruPolicy::kMostExponent);
  }

  TEST_CASE("a returning block with two uses is one of those used often") {
    Pool pool;
    std::multimap<std::uint64_t, std::uint32_t> due;
    for (int i = 0; i < 20000; ++i) {
      pool.come_or_use(pool.next++);  // Never again.
      const std::uint64_t now = pool.rows->uses();
      if (!due.empty() && due.begin()->first <= now) {
        pool.come_or_use(due.begin()->second);
        due.erase(due.begin());
      } else {
        due.emplace(now + kRows + hash_of(pool.next) % (3 * kRows), pool.next);
        pool.come(pool.next++);
        pool.use(pool.last);
      }
    }
    CHECK(pool.exponent() > 1.5);
  }

  TEST_CASE("blocks that return long after their eviction change nothing") {
    Pool pool;
    pool.play_loop(40000, 4 * kRows);
    CHECK(pool.exponent() == 1);
  }

  TEST_CASE("the time until a block returns is counted in uses, like its age") {
    Pool pool;
    pool.come(pool.next++);
    const std::uint32_t favorite = pool.last;
    const auto come = [&](std::uint32_t name) {
      pool.come_or_use(name);
      for (int i = 0; i < 9; ++i) pool.use(favorite);
    };
    // Each name returns once, at least 1,900 evictions after its own: 19,000 uses, twice as long as
    // it had stayed.
    for (std::uint32_t i = 0; i < 9000; ++i) {
      come(pool.next++);
      if (i >= 3000) come(pool.next - 3001);
    }
    CHECK(pool.exponent() == 1);
  }

  TEST_CASE("the weight of uses adapts in small steps") {
    Pool pool;
    for (int round = 0; round < 2; ++round) {
      pool.play_loop(40000);
      CHECK(pool.exponent() > 1.9);
      // Blocks used eight times stay 64 times as long as others at first, so that takes a while.
      pool.play_once_more(120000);
      CHECK(pool.exponent() < 0.5);
    }
    CHECK(pool.greatest_step <= 0.25);
    CHECK(pool.greatest_step > 0.1);
    // A quarter of the rows is evicted between two of them.
    CHECK(pool.evictions_of_step == kRows / 4);
  }

  TEST_CASE("an evicted block that returns has its former uses and one more") {
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

  TEST_CASE("a million rows cost 8 bytes each for evicted blocks") {
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

  TEST_CASE(
      "about as many names are known as there are entries, the latest ones, with their ages") {
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

  TEST_CASE("more entries than there is memory for are rejected") {
    const auto evicted = EvictedBlocks::create(std::uint64_t{1} << 50);

    REQUIRE_FALSE(evicted);
    CHECK(evicted.error().code == Errc::kOutOfCapacity);
  }
}

}  // namespace pegaflow::engine
