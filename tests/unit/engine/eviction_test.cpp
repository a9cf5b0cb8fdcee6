#include "engine/eviction/eviction.h"

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "engine/eviction/adaptive.h"

namespace pegaflow::engine {

namespace {

using Freed = EvictionPolicy::Freed;

struct Fixture {
  explicit Fixture(EvictionKind kind) {
    auto made_rows = BlockRows::create(16);
    REQUIRE(made_rows);
    rows = std::move(*made_rows);
    auto made = EvictionPolicy::create(kind, *rows, 16);
    REQUIRE(made);
    policy = std::move(*made);
  }
  std::vector<std::uint32_t> next(std::size_t count) const {
    std::vector<std::uint32_t> out;
    for (std::uint32_t row = policy->victim(); row != EvictionPolicy::kNone && out.size() < count;
         row = (*rows)[row].place.next_plus_1 - 1) {
      out.push_back(row);
    }
    return out;
  }
  std::unique_ptr<BlockRows> rows;
  std::unique_ptr<EvictionPolicy> policy;
};

}  // namespace

TEST_SUITE("EvictionPolicy") {
  TEST_CASE("a name leads to its policy and back; another one is rejected with the known names") {
    CHECK(eviction_kind("lru") == EvictionKind::kLru);
    CHECK(to_string(EvictionKind::kLru) == "lru");

    const auto unknown = eviction_kind("LRU");

    REQUIRE_FALSE(unknown);
    CHECK(unknown.error().code == Errc::kInvalidArgument);
    CHECK(unknown.error().detail == "unknown eviction policy \"LRU\"; use " + eviction_names());
  }

  TEST_CASE("more rows than there is memory for are rejected") {
    const auto rows = BlockRows::create(std::size_t{1} << 46);

    REQUIRE_FALSE(rows);
    CHECK(rows.error().code == Errc::kOutOfCapacity);
  }

  TEST_CASE("the memory of a policy is allocated page by page, and no further") {
    for (const EvictionKind kind : kEvictionKinds) {
      CAPTURE(to_string(kind));
      const auto rows = BlockRows::create(16);
      REQUIRE(rows);
      auto policy = EvictionPolicy::create(kind, **rows, 1'000'000);
      REQUIRE(policy);
      std::size_t pages = 0;
      while ((*policy)->touch(pages)) ++pages;
      // The contest touches its own memory, which does not grow with the pool, as it needs it.
      const auto* const adaptive = dynamic_cast<const AdaptivePolicy*>(policy->get());
      const std::uint64_t later = adaptive == nullptr ? 0 : adaptive->contest().memory_bytes();
      CHECK(pages == ((*policy)->memory_bytes() - later + 4095) / 4096);
    }
  }

  TEST_CASE("an age is the number of rows that became evictable since, whatever their policy") {
    Fixture f(EvictionKind::kLru);
    auto other = EvictionPolicy::create(EvictionKind::kLru, *f.rows, 16);
    REQUIRE(other);

    f.policy->sealed(3, 0);
    (*other)->sealed(4, 0);
    f.policy->sealed(5, 0);

    CHECK(f.rows->age(3) == 2);
    CHECK(f.rows->age(5) == 0);
    CHECK(f.policy->victim() == 3);
    CHECK((*other)->victim() == 4);
  }

  TEST_CASE("without an evictable row there is no victim") {
    Fixture f(EvictionKind::kLru);
    CHECK(f.policy->victim() == EvictionPolicy::kNone);

    f.policy->sealed(1, 0);
    f.policy->taken(1);

    CHECK(f.policy->victim() == EvictionPolicy::kNone);
    CHECK(f.next(3).empty());
  }

  TEST_CASE("check() finds a row that is in the wrong list") {
    Fixture f(EvictionKind::kLru);
    f.policy->sealed(1, 0);
    f.policy->sealed(2, 0);

    CHECK(f.policy->check([](std::uint32_t) { return true; }));
    const auto broken = f.policy->check([](std::uint32_t row) { return row != 2; });

    REQUIRE_FALSE(broken);
    CHECK(broken.error().code == Errc::kInternal);
  }
}

TEST_SUITE("LruPolicy") {
  TEST_CASE(
      "the row evictable for longest is the victim; taken rows stay; another use changes nothing") {
    Fixture f(EvictionKind::kLru);
    for (const std::uint32_t row : {1U, 2U, 3U, 4U}) f.policy->sealed(row, row);

    f.policy->taken(1);
    f.policy->used_again(1);
    f.policy->taken(3);
    f.policy->released(1);

    CHECK(f.next(4) == std::vector<std::uint32_t>{2, 4, 1});
    CHECK(f.next(1) == std::vector<std::uint32_t>{2});
    CHECK(f.policy->victim() == 2);
    CHECK(f.policy->size() == 3);

    f.policy->freed(2, 2, Freed::kEvicted);
    f.policy->freed(1, 1, Freed::kDropped);

    CHECK(f.next(4) == std::vector<std::uint32_t>{4});
  }
}

}  // namespace pegaflow::engine
