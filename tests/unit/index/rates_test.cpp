#include "index/placement/rates.h"

#include <cmath>
#include <initializer_list>
#include <limits>

#include <doctest/doctest.h>

namespace pegaflow::index {
namespace {

double time_of(double tokens, double floor, double rate) { return floor + tokens / rate; }

TEST_SUITE("PrefillRate") {
  TEST_CASE("a rate starts at the assumed speed") {
    const PrefillRate rate;

    CHECK(rate.tokens_per_second() == doctest::Approx(8000));
    CHECK(rate.seconds(0) == 0);
    CHECK(rate.seconds(8000) == doctest::Approx(1.01));
  }

  TEST_CASE("floor and speed are found from prompts of different lengths") {
    PrefillRate rate;

    for (int i = 0; i < 40; ++i) {
      const double tokens = 200.0 + 700.0 * (i % 9);
      rate.add(tokens, time_of(tokens, 0.05, 20000));
    }

    CHECK(rate.tokens_per_second() == doctest::Approx(20000).epsilon(0.02));
    CHECK(rate.floor_seconds() == doctest::Approx(0.05).epsilon(0.05));
  }

  TEST_CASE("an engine that becomes half as fast is noticed within 200 requests") {
    PrefillRate rate;
    for (int i = 0; i < 500; ++i)
      rate.add(1000 + 500 * (i % 7), time_of(1000 + 500 * (i % 7), 0, 20000));

    for (int i = 0; i < 200; ++i)
      rate.add(1000 + 500 * (i % 7), time_of(1000 + 500 * (i % 7), 0, 10000));

    CHECK(rate.tokens_per_second() == doctest::Approx(10000).epsilon(0.05));
  }

  TEST_CASE("equal prompts for a long time leave the estimate finite and right for them") {
    PrefillRate rate;

    for (int i = 0; i < 100000; ++i) rate.add(4096, 0.4);

    CHECK(rate.seconds(4096) == doctest::Approx(0.4).epsilon(0.01));
    rate.add(512, 0.06);
    CHECK(std::isfinite(rate.seconds(100000)));
  }

  TEST_CASE("a stall does not turn into a slow engine") {
    PrefillRate rate;
    for (int i = 0; i < 100; ++i)
      rate.add(1000 + 100 * (i % 9), time_of(1000 + 100 * (i % 9), 0.01, 15000));

    rate.add(1000, 600);

    CHECK(rate.seconds(1000) < 0.2);
  }

  TEST_CASE("samples that are no measurement are ignored") {
    PrefillRate rate;
    const double none = std::numeric_limits<double>::quiet_NaN();

    for (const double tokens : {0.0, -1.0, none}) rate.add(tokens, 1);
    for (const double seconds : {0.0, -1.0, none, 1e9}) rate.add(1000, seconds);

    CHECK(rate.samples() == 0);
    CHECK(rate.tokens_per_second() == doctest::Approx(8000));
  }

  TEST_CASE("the estimate stays within its limits whatever the samples are") {
    PrefillRate rate;
    for (int i = 0; i < 1000; ++i) rate.add(i % 2 == 0 ? 1 : 100000, i % 2 == 0 ? 3000 : 1e-6);

    CHECK(rate.tokens_per_second() >= 200);
    CHECK(rate.tokens_per_second() <= 2e6 * 1.001);
    CHECK(rate.floor_seconds() >= 0);
    CHECK(rate.floor_seconds() <= 0.5);
  }
}

TEST_SUITE("LinkRate") {
  TEST_CASE("a link without a measurement is assumed by its lane") {
    CHECK(LinkRate::start(Lane::kTcp).bytes_per_second == 3e9);
    CHECK(LinkRate::start(Lane::kRdma).bytes_per_second == 20e9);
    CHECK(LinkRate::start(Lane::kTcp).seconds(0) == 0);
    CHECK(LinkRate::start(Lane::kTcp).seconds(3e9) == doctest::Approx(1.001));
  }
}

TEST_SUITE("PredictionError") {
  TEST_CASE(
      "the error of cached tokens is a share of the prompt, and its sign shows the direction") {
    PredictionError error;

    error.add_cached(1000, 500, 250);
    error.add_cached(1000, 0, 250);

    CHECK(error.cached_error() == doctest::Approx(0.25));
    CHECK(error.cached_bias() == doctest::Approx(0));
    CHECK(error.requests() == 2);
  }

  TEST_CASE("old errors fade") {
    PredictionError error;
    for (int i = 0; i < 50; ++i) error.add_cached(1000, 1000, 0);
    for (int i = 0; i < 200; ++i) error.add_cached(1000, 500, 500);

    CHECK(error.cached_error() < 0.01);
  }

  TEST_CASE("an empty prompt is no request") {
    PredictionError error;
    error.add_cached(0, 1, 1);
    error.add_time(1, 0);

    CHECK(error.requests() == 0);
    CHECK(error.time_error() == 0);
  }
}

}  // namespace
}  // namespace pegaflow::index
