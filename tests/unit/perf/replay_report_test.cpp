#include "perf/replay/replay_report.h"

#include <algorithm>

#include <doctest/doctest.h>

namespace pegaflow::perf {
namespace {

const RequestTrace kTrace{.name = "some", .requests = {{1, 2}, {1, 2}}};

ReplayResult result(const char* eviction, std::uint64_t found, double cpu_us) {
  return {.blocks = 1000,
          .eviction = eviction,
          .seen = {.requests = 2,
                   .asked = 4,
                   .found = found,
                   .question_us = {10, 20},
                   .load_us = {30},
                   .save_us = {40, 50}},
          .counted = {.evictions = 7, .resident = 1000, .saved_bytes = 4096, .loaded_bytes = 8192},
          .cpu_us = {cpu_us, cpu_us},
          .mean_cpu_us = cpu_us};
}

const Figure& figure(const std::vector<Figure>& figures, std::string_view run,
                     const std::string& eviction) {
  const Params::value_type policy{"eviction", eviction};
  const auto found = std::find_if(figures.begin(), figures.end(), [&](const Figure& figure) {
    return figure.run == run &&
           std::find(figure.params.begin(), figure.params.end(), policy) != figure.params.end();
  });
  REQUIRE(found != figures.end());
  return *found;
}

TEST_SUITE("replay_report") {
  TEST_CASE(
      "the targets are LRU's hit rate for the default, 1.3 x its processor time for each policy") {
    const ReplayResult results[] = {result("lru", 2, 100), result("slru", 1, 120),
                                    result("weighted-lru", 1, 140)};
    const std::vector<Figure> figures = replay_figures(kTrace, results).value();

    CHECK(figure(figures, kHitRateRun, "lru").figure == 0.5);
    CHECK_FALSE(figure(figures, kHitRateRun, "lru").bound);
    CHECK(figure(figures, kHitRateRun, "slru").ratio().value() == 0.5);
    CHECK_FALSE(figure(figures, kHitRateRun, "slru").held());
    CHECK_FALSE(figure(figures, kHitRateRun, "weighted-lru").held().value());
    CHECK_FALSE(figure(figures, kCpuRun, "lru").bound);
    CHECK(figure(figures, kCpuRun, "slru").held().value());
    CHECK_FALSE(figure(figures, kCpuRun, "weighted-lru").held().value());
    CHECK(figure(figures, "save, p50", "slru").figure == 45);
    CHECK(figure(figures, "evictions", "slru").figure == 7);
    CHECK(figure(figures, "loaded", "slru").figure == 8192);
  }

  TEST_CASE("without LRU no figure has a bound") {
    const ReplayResult results[] = {result("weighted-lru", 2, 100)};
    const std::vector<Figure> figures = replay_figures(kTrace, results).value();
    CHECK_FALSE(figures.empty());
    for (const Figure& each : figures) {
      CAPTURE(each.run);
      CHECK_FALSE(each.bound);
    }
  }

  TEST_CASE("a policy that never loaded has no load time, not a time of zero") {
    ReplayResult never = result("lru", 0, 100);
    never.seen.load_us.clear();
    const ReplayResult results[] = {never};
    const std::vector<Figure> figures = replay_figures(kTrace, results).value();
    CHECK(std::none_of(figures.begin(), figures.end(),
                       [](const Figure& each) { return each.run.starts_with("load, "); }));
    CHECK(replay_table(results, figures).find("  -  ") != std::string::npos);
  }

  TEST_CASE("a part without processor time of the bound is an error") {
    const ReplayResult results[] = {result("lru", 2, 0), result("slru", 2, 100)};
    CHECK(replay_figures(kTrace, results).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("the table has a row for each policy, and a note where claims were shortened") {
    ReplayResult shortened = result("slru", 3, 120);
    shortened.seen.shortened = 5;
    const ReplayResult results[] = {result("lru", 2, 100), shortened};
    const std::vector<Figure> figures = replay_figures(kTrace, results).value();
    const std::string table = replay_table(results, figures);
    CHECK(std::count(table.begin(), table.end(), '\n') == 5);  // With an empty line and a note.
    CHECK(table.find("0.7500") != std::string::npos);
    CHECK(table.find("1.500") != std::string::npos);
    CHECK(table.find("1,000 blocks, slru: 5 blocks were found and not claimed") !=
          std::string::npos);
  }

  TEST_CASE("the description of a trace has its counts and the ceiling of its hit rate") {
    CHECK(describe(kTrace) ==
          "2 requests for 4 blocks, 2 of them distinct; an unlimited pool would find 0.5000");
  }
}

}  // namespace
}  // namespace pegaflow::perf
