// The rule that a contest prefers, on requests for which the best one is known.

#include "engine/eviction/contest.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "base/clock.h"
#include "engine/kept/kept_tables.h"
#include "tests/support/seed.h"

namespace pegaflow::engine {

namespace {

constexpr std::uint32_t kRows = 256;  // So few that every name is sampled.

std::uint32_t hash_of(std::uint32_t name) {
  const std::uint64_t mixed = (name + 1) * 0x9E3779B97F4A7C15ULL;
  return static_cast<std::uint32_t>(mixed >> 32U);
}

struct Requests {
  explicit Requests(std::uint32_t rows = kRows) : contest(Contest::create(rows).value()) {}
  explicit Requests(Contest of) : contest(std::move(of)) {}

  void request(std::uint32_t name) {
    const std::uint32_t hash = hash_of(name);
    if (contest.samples(hash)) contest.use(std::span(&hash, 1), now);
    ++now;
  }
  /// Prompts of ten names, all in turn, several times.
  void loop(std::uint32_t first, std::uint32_t names, int times) {
    for (int i = 0; i < times; ++i) {
      for (std::uint32_t at = first; at < first + names; ++at) request(at);
    }
  }
  /// Each name is requested twice, the second time after some others, and never again.
  void pass_by(std::uint32_t names, std::uint32_t after) {
    for (std::uint32_t i = 0; i < names; ++i) {
      request(next + i);
      if (i >= after) request(next + i - after);
    }
    next += names;
  }
  [[nodiscard]] double hits_of(double exponent, double patience) const {
    for (std::size_t rule = 0; rule < Contest::kRules; ++rule) {
      const EvictionRule& each = Contest::rules()[rule];
      if (each.exponent() == exponent && each.patience() == patience) return contest.hits()[rule];
    }
    FAIL("no such rule");
    return 0;
  }

  Contest contest;
  std::uint32_t now = 0;
  std::uint32_t next = 1'000'000;
};

/// Memory that outlives a process.
struct Kept {
  /// The contest of the next process.
  [[nodiscard]] Contest contest() const {
    PolicyMemory memory(tables.policy(0));
    memory.begin(1);
    return Contest::create(kRows, memory).value();
  }

  ManualClock clock;
  KeptTables tables =
      KeptTables::create({.pool = {1, 1}, .pool_bytes = std::uint64_t{1} << 20}, clock).value();
};

}  // namespace

TEST_SUITE("Contest") {
  TEST_CASE("without requests the first rule is nearly LRU and refuses nothing") {
    Requests r;
    CHECK(r.contest.best(true).exponent() == 0.25);
    CHECK_FALSE(r.contest.best(true).may_refuse());
  }

  TEST_CASE("a loop over more blocks than the pool has is best met by refusals") {
    for (const std::uint32_t rows : {kRows, 100 * kRows}) {
      CAPTURE(rows);
      Requests r(rows);
      r.loop(0, rows * 3 / 2, 12);
      CHECK(r.hits_of(0, 0) == 0);
      CHECK(r.hits_of(0, 2) > 0);
      CHECK(r.contest.best(true).may_refuse());
    }
  }

  TEST_CASE("where nothing may be refused, the rule is one that refuses nothing") {
    Requests r;
    r.loop(0, kRows * 3 / 2, 12);
    REQUIRE(r.contest.best(true).may_refuse());
    CHECK_FALSE(r.contest.best(false).may_refuse());
  }

  TEST_CASE("a pool with room for all keeps its first rule") {
    Requests r;
    r.loop(0, kRows / 2, 50);
    CHECK(r.contest.best(true).exponent() == 0.25);
    CHECK_FALSE(r.contest.best(true).may_refuse());
  }

  TEST_CASE("once requests move on, the contest returns to a rule without refusals") {
    Requests r;
    r.loop(0, kRows * 3 / 2, 12);
    REQUIRE(r.contest.best(true).may_refuse());
    r.pass_by(100'000, kRows / 3);
    CHECK_FALSE(r.contest.best(true).may_refuse());
    CHECK(r.hits_of(0, 0) > r.hits_of(0, 8));
  }

  TEST_CASE("names that recur among many that do not make uses count") {
    Requests r;
    std::mt19937_64 random(testing::seed());
    for (int i = 0; i < 100'000; ++i) {
      r.request(i % 3 == 0 ? static_cast<std::uint32_t>(random() % kRows) : r.next++);
    }
    CHECK(r.hits_of(1, 0) > 1.05 * r.hits_of(0, 0));
    CHECK(r.contest.best(false).exponent() >= 0.5);
  }

  TEST_CASE("the start of a prompt stays longer than its end") {
    Requests r;
    std::vector<std::uint32_t> prompt(kRows / 2);
    for (std::uint32_t i = 0; i < prompt.size(); ++i) prompt[i] = hash_of(i);
    r.contest.use(prompt, 0);
    // Others take the room of all but ten.
    for (std::uint32_t i = 0; i < kRows - 10; ++i) r.request(10'000 + i);
    const double before = r.hits_of(0, 0);
    r.contest.use(std::span(prompt).first(10), r.now);
    CHECK(r.hits_of(0, 0) > before + 9);
    const double then = r.hits_of(0, 0);
    r.contest.use(std::span(prompt).subspan(10, 100), r.now);
    CHECK(r.hits_of(0, 0) == then);
  }

  TEST_CASE("it continues what a former process left, and begins anew where that is damaged") {
    Kept kept;
    std::mt19937 random(static_cast<std::uint32_t>(testing::seed()));
    const auto play = [&](Contest& contest, std::uint32_t count) {
      for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint32_t hash = hash_of(static_cast<std::uint32_t>(random() % 600));
        contest.use(std::span(&hash, 1), i);
      }
    };
    const auto total = [](const Contest& contest) {
      double sum = 0;
      for (const double hits : contest.hits()) sum += hits;
      return sum;
    };
    std::uint32_t anew = 0;
    for (int round = 0; round < 100; ++round) {
      Contest contest = kept.contest();
      REQUIRE(contest.is_whole());
      play(contest, 300);
      REQUIRE(contest.is_whole());
      REQUIRE(total(kept.contest()) == total(contest));
      const std::span<std::byte> bytes = kept.tables.policy(0).subspan(4096, 700'000);
      for (std::uint32_t i = 0; i < 200; ++i) bytes[random() % bytes.size()] ^= std::byte{1};
      if (total(kept.contest()) == 0) ++anew;
    }
    CHECK(anew > 50);
  }

  TEST_CASE("a later process follows the rule that the former one followed") {
    Kept kept;
    Requests r(kept.contest());
    r.loop(0, kRows * 3 / 2, 12);
    REQUIRE(r.contest.best(true).may_refuse());

    Contest contest = kept.contest();
    CHECK(&contest.followed() == &r.contest.followed());
    CHECK(contest.followed().may_refuse());
  }

  TEST_CASE("of a large pool it samples as many names as it has rows for") {
    const Requests r(1'000'000);
    std::uint32_t sampled = 0;
    for (std::uint32_t name = 0; name < 1'000'000; ++name) {
      if (r.contest.samples(hash_of(name))) ++sampled;
    }
    CHECK(sampled > 200);
    CHECK(sampled < 310);
  }
}

}  // namespace pegaflow::engine
