#include "perf/lib/figures.h"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

namespace pegaflow::perf {
namespace {

Figure sample_figure() {
  return {.run = "lookup of 8192 keys, p50",
          .params = {{"keys", 8192}, {"note", "\"quoted\""}},
          .figure = 0.3,
          .unit = "ms",
          .bound = 0.2,
          .bound_name = "echo",
          .side = Side::kAtMost,
          .target = 2,
          .n = 40,
          .spread = "1.4 to 1.6"};
}

TEST_SUITE("figures") {
  TEST_CASE("quantiles lie between the nearest ranks") {
    const Samples samples = Samples::of({40, 10, 30, 20}).value();
    CHECK(samples.quantile(0) == 10);
    CHECK(samples.quantile(1) == 40);
    CHECK(samples.median() == 25);
    CHECK(samples.quantile(0.9) == doctest::Approx(37));
    CHECK(samples.quantile(-1) == 10);
    CHECK(samples.quantile(2) == 40);
    CHECK(samples.count() == 4);
  }

  TEST_CASE("one sample is every quantile") {
    const Samples samples = Samples::of({7}).value();
    CHECK(samples.quantile(0.01) == 7);
    CHECK(samples.quantile(0.99) == 7);
  }

  TEST_CASE("no sample is an error, not a zero") {
    CHECK(Samples::of({}).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a comparison is the ratio of medians, with the spread of the rounds' ratios") {
    Rounds rounds;
    rounds.add({2, 2, 2}, {1, 1, 1});    // 2
    rounds.add({4, 4, 4}, {2, 2, 2});    // 2
    rounds.add({9, 9, 900}, {3, 3, 3});  // 3: one outlier moves no median.

    const Rounds::Comparison compared = rounds.compare().value();

    CHECK(compared.figure.median() == 4);
    CHECK(compared.bound.median() == 2);
    CHECK(compared.ratio == 2);
    CHECK(compared.ratio_low == doctest::Approx(2));
    CHECK(compared.ratio_high == doctest::Approx(2.8));
    CHECK(compared.rounds == 3);
  }

  TEST_CASE("rounds without samples, or with a bound of 0, are errors") {
    Rounds rounds;
    CHECK(rounds.compare().error().code == Errc::kInvalidArgument);
    rounds.add({1}, {0});
    CHECK(rounds.compare().error().code == Errc::kInvalidArgument);
    Rounds empty_round;
    empty_round.add({}, {1});
    CHECK(empty_round.compare().error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a target applies to its side of the bound") {
    Figure figure = sample_figure();
    CHECK(figure.ratio().value() == doctest::Approx(1.5));
    CHECK(figure.held().value());
    figure.side = Side::kAtLeast;
    CHECK_FALSE(figure.held().value());
    figure.target = 0.9;
    CHECK(figure.held().value());
  }

  TEST_CASE("without a bound nothing is held") {
    Figure figure = sample_figure();
    figure.bound.reset();
    CHECK_FALSE(figure.ratio());
    CHECK_FALSE(figure.held());
  }

  TEST_CASE("a bound for comparison only has a ratio and no target") {
    Figure figure = sample_figure();
    figure.target.reset();
    CHECK(figure.ratio().value() == doctest::Approx(1.5));
    CHECK_FALSE(figure.held());
  }

  TEST_CASE("a bound of zero has no ratio, and only zero meets it") {
    Figure figure = sample_figure();
    figure.bound = 0;
    CHECK_FALSE(figure.ratio());
    CHECK_FALSE(figure.held().value());
    figure.figure = 0;
    CHECK(figure.held().value());
  }

  TEST_CASE("a JSON line is one object with every documented field") {
    const std::string line = json_line(sample_figure(), {.version = "1", .cores = 2, .seed = 9});
    CHECK(line.find('\n') == std::string::npos);
    const auto object = nlohmann::json::parse(line);
    CHECK(object["run"] == "lookup of 8192 keys, p50");
    CHECK(object["params"]["keys"] == 8192);
    CHECK(object["params"]["note"] == "\"quoted\"");
    CHECK(object["figure"] == 0.3);
    CHECK(object["unit"] == "ms");
    CHECK(object["bound"] == 0.2);
    CHECK(object["bound_name"] == "echo");
    CHECK(object["ratio"].get<double>() == doctest::Approx(1.5));
    CHECK(object["target_is"] == "at most");
    CHECK(object["held"] == true);
    CHECK(object["n"] == 40);
    CHECK(object["spread"] == "1.4 to 1.6");
    CHECK(object["seed"] == 9);
  }

  TEST_CASE("a missing bound is null, not zero") {
    Figure figure = sample_figure();
    figure.bound.reset();
    const auto object = nlohmann::json::parse(json_line(figure, {}));
    CHECK(object["bound"].is_null());
    CHECK(object["ratio"].is_null());
    CHECK(object["held"].is_null());
  }

  TEST_CASE("numbers keep their significant digits") {
    CHECK(format_number(0) == "0");
    CHECK(format_number(0.4123) == "0.412");
    CHECK(format_number(4.126) == "4.13");
    CHECK(format_number(41.26) == "41.3");
    CHECK(format_number(1234567.8) == "1,234,568");
    CHECK(format_number(-1500) == "-1,500");
    CHECK(format_number(999) == "999");
  }

  TEST_CASE("a table shows a missed target in capitals") {
    Figure missed = sample_figure();
    missed.figure = 1;
    const Figure kept = sample_figure();
    const std::vector<Figure> figures = {kept, missed};
    const std::string text = table("lookup", figures, {.version = "1", .cores = 2});
    CHECK(text.find("<= 2  yes") != std::string::npos);
    CHECK(text.find("<= 2  NO") != std::string::npos);
    CHECK(text.find("bound: echo") != std::string::npos);
  }
}

}  // namespace
}  // namespace pegaflow::perf
