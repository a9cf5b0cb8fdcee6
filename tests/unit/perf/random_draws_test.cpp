#include "perf/lib/random_draws.h"

#include <algorithm>
#include <cmath>

#include <doctest/doctest.h>

#include "perf/lib/figures.h"

namespace pegaflow::perf {
namespace {

constexpr std::size_t kMany = 100'000;

Samples samples(const auto& draw) {
  std::vector<double> values;
  for (std::size_t i = 0; i < kMany; ++i) values.push_back(draw());
  return Samples::of(std::move(values)).value();
}

TEST_SUITE("random_draws") {
  TEST_CASE("the sequence of a seed never changes") {
    // Vigna's SplitMix64. Documents quote seeds, so another sequence would be another workload.
    Draws draws(1234567);
    CHECK(draws.next() == 6457827717110365317ULL);
    CHECK(draws.next() == 3203168211198807973ULL);
    CHECK(draws.next() == 9817491932198370423ULL);
  }

  TEST_CASE("uniform draws fill [0, 1), and ranges include both ends") {
    Draws draws(1);
    const Samples uniform = samples([&] { return draws.uniform(); });
    CHECK(uniform.quantile(0) >= 0);
    CHECK(uniform.quantile(1) < 1);
    CHECK(uniform.median() == doctest::Approx(0.5).epsilon(0.02));
    const Samples dice = samples([&] { return static_cast<double>(draws.between(1, 6)); });
    CHECK(dice.quantile(0) == 1);
    CHECK(dice.quantile(1) == 6);
    const Samples coins = samples([&] { return draws.with_chance(0.9) ? 1.0 : 0.0; });
    CHECK(coins.quantile(0.08) == 0);
    CHECK(coins.quantile(0.12) == 1);
  }

  TEST_CASE("times between events have the expected median") {
    Draws draws(2);
    const Samples times = samples([&] { return draws.exponential(10); });
    CHECK(times.median() == doctest::Approx(10 * std::log(2)).epsilon(0.03));
    CHECK(times.quantile(0.9) == doctest::Approx(10 * std::log(10)).epsilon(0.03));
  }

  TEST_CASE("lognormal draws have their median and their spread") {
    Draws draws(3);
    const Samples sizes = samples([&] { return draws.lognormal(1.2, 1); });
    CHECK(sizes.median() == doctest::Approx(std::exp(1.2)).epsilon(0.03));
    // One standard deviation above.
    CHECK(sizes.quantile(0.8413) == doctest::Approx(std::exp(2.2)).epsilon(0.04));
  }

  TEST_CASE("weights determine the frequency of each draw") {
    const double weights[] = {1, 0, 3};
    const Weighted weighted(weights);
    Draws draws(4);
    std::size_t counts[3] = {};
    for (std::size_t i = 0; i < kMany; ++i) ++counts[weighted.draw(draws)];
    CHECK(counts[1] == 0);
    CHECK(static_cast<double>(counts[0]) == doctest::Approx(kMany / 4.0).epsilon(0.03));
    CHECK(counts[0] + counts[2] == kMany);
  }

  TEST_CASE("rank i of Zipf's law is drawn 1 / (i + 1)^s times as often as the first") {
    const Weighted zipf = Weighted::zipf(1000, 1);
    Draws draws(5);
    std::vector<double> counts(1000);
    for (std::size_t i = 0; i < kMany; ++i) ++counts[zipf.draw(draws)];
    CHECK(counts[0] / counts[1] == doctest::Approx(2).epsilon(0.05));
    CHECK(counts[0] / counts[9] == doctest::Approx(10).epsilon(0.1));
  }
}

}  // namespace
}  // namespace pegaflow::perf
