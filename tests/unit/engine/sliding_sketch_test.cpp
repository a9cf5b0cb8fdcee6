#include "engine/demand/sliding_sketch.h"

#include <cmath>
#include <random>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

namespace pegaflow::engine {
namespace {

/// Standard error of a count with 4,096 registers, and of the sums that add() returns; five of them
/// hold in all but one of a million runs.
constexpr double kError = 1.04 / 64;

SlidingSketch sketch(std::size_t windows) {
  auto made = SlidingSketch::create(windows);
  REQUIRE(made);
  return std::move(*made);
}

TEST_SUITE("SlidingSketch") {
  TEST_CASE("it has one window to eight") {
    CHECK(SlidingSketch::create(0).error().code == Errc::kInvalidArgument);
    CHECK(SlidingSketch::create(9).error().code == Errc::kInvalidArgument);
    CHECK(SlidingSketch::create(8));
  }

  TEST_CASE("an empty sketch counts nothing") { CHECK(sketch(1).count(0) == 0); }

  TEST_CASE("counts lie within five standard errors, from one to millions") {
    std::mt19937_64 random(testing::seed());
    for (const std::uint64_t n : {1, 10, 100, 1'000, 10'000, 100'000, 3'000'000}) {
      SlidingSketch counted = sketch(1);
      SlidingSketch::Weights fresh{};

      for (std::uint64_t i = 0; i < n; ++i) counted.add(random(), 1, fresh);

      CAPTURE(n);
      const auto exact = static_cast<double>(n);
      CHECK(std::abs(counted.count(0) - exact) <= 5 * kError * exact + 0.5);
      CHECK(std::abs(fresh[0] - exact) <= 5 * kError * exact + 0.5);
    }
  }

  TEST_CASE("a hash that was seen before changes nothing, and is not new") {
    std::mt19937_64 random(testing::seed());
    std::vector<std::uint64_t> hashes(20'000);
    for (std::uint64_t& hash : hashes) hash = random();
    SlidingSketch counted = sketch(1);
    SlidingSketch::Weights first{};
    SlidingSketch::Weights again{};

    for (const std::uint64_t hash : hashes) counted.add(hash, 1, first);
    const double count = counted.count(0);
    for (const std::uint64_t hash : hashes) counted.add(hash, 2, again);

    CHECK(again[0] == 0);
    CHECK(counted.count(0) == count);
  }

  TEST_CASE("new hashes among many known ones are distinguished") {
    std::mt19937_64 random(testing::seed());
    std::vector<std::uint64_t> known(50'000);
    for (std::uint64_t& hash : known) hash = random();
    SlidingSketch counted = sketch(1);
    SlidingSketch::Weights unused{};
    SlidingSketch::Weights fresh{};
    for (const std::uint64_t hash : known) counted.add(hash, 1, unused);

    // As many new hashes as known ones, alternating.
    for (const std::uint64_t hash : known) {
      counted.add(hash, 1, fresh);
      counted.add(random(), 1, fresh);
    }

    // A new one weighs 50,000 / 4,096 to twice that; so the sum's error is below that of a count.
    CHECK(std::abs(fresh[0] - 50'000) <= 5 * 1.5 * kError * 50'000);
  }

  TEST_CASE("each window forgets in its own time, and remembers hashes that were seen again") {
    std::mt19937_64 random(testing::seed());
    std::vector<std::uint64_t> old(30'000);
    for (std::uint64_t& hash : old) hash = random();
    SlidingSketch counted = sketch(2);
    SlidingSketch::Weights fresh{};
    for (const std::uint64_t hash : old) counted.add(hash, 10, fresh);
    for (std::size_t i = 0; i < 10'000; ++i) counted.add(random(), 20, fresh);
    // A third of the old ones is requested again.
    for (std::size_t i = 0; i < 10'000; ++i) counted.add(old[i], 20, fresh);

    counted.slide(0, 11);
    counted.slide(1, 10);

    CHECK(std::abs(counted.count(0) - 20'000) <= 5 * kError * 20'000);
    CHECK(std::abs(counted.count(1) - 40'000) <= 5 * kError * 40'000);
    SlidingSketch::Weights again{};
    for (const std::uint64_t hash : old) counted.add(hash, 21, again);
    CHECK(std::abs(again[0] - 20'000) <= 5 * 1.5 * kError * 20'000);
    CHECK(again[1] == 0);

    counted.slide(0, 100);
    counted.slide(1, 100);
    CHECK(counted.count(0) == 0);
    CHECK(counted.count(1) == 0);
  }
}

}  // namespace
}  // namespace pegaflow::engine
