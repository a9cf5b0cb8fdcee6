/// \file
/// `pegaflow-perf directory`: claims on nodes that know each other by a directory on Redis, beside
/// nodes without it, while the directory answers, is killed and is stopped; and the time until it
/// has all anchors again after FLUSHALL.

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <iostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "perf/lib/command.h"
#include "perf/lib/random_draws.h"
#include "perf/server/directory_nodes.h"

namespace pegaflow::perf {
namespace {

using Way = DirectoryNodes::Way;
using Clock = std::chrono::steady_clock;

/// Milliseconds that the directory may add to the p99 of a claim.
constexpr double kAnswers = 3;
constexpr double kDown = 6;
/// Parts of a phase, whose percentiles are its spread.
constexpr std::size_t kParts = 5;

struct DirectoryOptions {
  CommonOptions common;
  std::int64_t nodes = 16;
  std::int64_t redis = 3;
  std::int64_t keys = 640;
  std::int64_t rounds = 40;
  std::int64_t flushes = 5;
};

constexpr std::array kWays = {Way::kDirectory, Way::kListed, Way::kAlone};

/// The claims in one state of the directory.
struct Phase {
  std::string name;
  double limit_ms = 0;     ///< The most that the directory may add to the p99.
  bool has_first = false;  ///< The first claim with the directory at each node is for itself.
  std::array<std::vector<double>, kWays.size()> ms{};  ///< By way.
  std::vector<double> first_ms{};
  std::size_t failed = 0;
  std::size_t lookups = 0;  ///< Lookups of prompts of other nodes.
  std::size_t found = 0;
  [[nodiscard]] const std::vector<double>& of(Way way) const {
    return ms.at(static_cast<std::size_t>(way));
  }
};

/// A claim of each way, and a lookup that keeps links in use, at each node in turn.
void measure(DirectoryNodes& nodes, const DirectoryOptions& options, Phase& phase) {
  progress("claims: " + phase.name);
  const auto claims = static_cast<std::size_t>(options.rounds) * nodes.count();
  for (std::size_t turn = 0; turn < claims; ++turn) {
    for (std::size_t i = 0; i < kWays.size(); ++i) {
      // Their order changes, so that no way is always right after the lookup.
      const Way way = kWays.at((i + turn) % kWays.size());
      const auto us = nodes.claim_missing(way, turn);
      if (!us) {
        std::cerr << "a claim failed: " << us.error().detail << '\n';
        ++phase.failed;
        continue;
      }
      const bool is_first = phase.has_first && way == Way::kDirectory && turn < nodes.count();
      (is_first ? phase.first_ms : phase.ms.at(static_cast<std::size_t>(way)))
          .push_back(*us / 1000);
    }
    const auto found = nodes.find_elsewhere(turn);
    if (!found) {
      std::cerr << "a lookup failed: " << found.error().detail << '\n';
      ++phase.failed;
      continue;
    }
    ++phase.lookups;
    phase.found += *found ? 1 : 0;
  }
}

Result<double> added_p99(std::vector<double> with, std::vector<double> without) {
  PEGA_TRY_LET(const Samples one, Samples::of(std::move(with)));
  PEGA_TRY_LET(const Samples other, Samples::of(std::move(without)));
  return one.quantile(0.99) - other.quantile(0.99);
}

/// "-0.1 to 2.3 ms in 5 parts": the share of each part of a phase.
Result<std::string> spread_of(const Phase& phase) {
  const std::vector<double>& with = phase.of(Way::kDirectory);
  const std::vector<double>& without = phase.of(Way::kAlone);
  const std::size_t each = std::min(with.size(), without.size()) / kParts;
  std::vector<double> parts;
  for (std::size_t i = 0; i < kParts; ++i) {
    const auto part = [&](const std::vector<double>& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(i * each);
      return std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(each));
    };
    PEGA_TRY_LET(const double added, added_p99(part(with), part(without)));
    parts.push_back(added);
  }
  const auto [low, high] = std::minmax_element(parts.begin(), parts.end());
  return fmt::format("{:.2f} to {:.2f} ms in {} parts", *low, *high, kParts);
}

/// The claims of a phase beside those of a node without the directory.
Result<void> report_beside(const Phase& phase, Way beside, const std::string& claims,
                           const Params& params, std::vector<Figure>& figures) {
  PEGA_TRY_LET(const Samples with, Samples::of(phase.of(Way::kDirectory)));
  PEGA_TRY_LET(const Samples without, Samples::of(phase.of(beside)));
  for (const double fraction : {0.5, 0.99}) {
    figures.push_back(
        {.run = fmt::format("{}, p{:g}", claims, fraction * 100),
         .params = params,
         .figure = with.quantile(fraction),
         .unit = "ms",
         .bound = without.quantile(fraction),
         .bound_name = beside == Way::kAlone ? "a node alone" : "a node with all in --peers",
         .target = std::nullopt,
         .n = with.count(),
         .spread =
             fmt::format("longest {:.2f} and {:.2f} ms", with.quantile(1), without.quantile(1))});
  }
  return {};
}

Result<void> report(const Phase& phase, const DirectoryOptions& options,
                    std::vector<Figure>& figures) {
  const Params params = {
      {"keys", options.keys}, {"nodes", options.nodes}, {"redis", options.redis}};
  const std::string claims = fmt::format("claim of {} missing keys, {}", options.keys, phase.name);
  PEGA_TRY(report_beside(phase, Way::kAlone, claims, params, figures));
  PEGA_TRY(report_beside(phase, Way::kListed, claims, params, figures));
  PEGA_TRY_LET(const double added, added_p99(phase.of(Way::kDirectory), phase.of(Way::kAlone)));
  PEGA_TRY_LET(std::string spread, spread_of(phase));
  figures.push_back({.run = claims + ", added to the p99 of a node alone",
                     .params = params,
                     .figure = added,
                     .unit = "ms",
                     .bound = phase.limit_ms,
                     .bound_name = "its limit",
                     .n = phase.of(Way::kDirectory).size(),
                     .spread = std::move(spread)});
  if (!phase.first_ms.empty()) {
    PEGA_TRY_LET(const Samples first, Samples::of(phase.first_ms));
    figures.push_back(
        {.run = claims + ", the first of each node, p50",
         .params = params,
         .figure = first.median(),
         .unit = "ms",
         .n = first.count(),
         .spread = fmt::format("{:.2f} to {:.2f} ms", first.quantile(0), first.quantile(1))});
  }
  figures.push_back({.run = "prompts of other nodes that were found, " + phase.name,
                     .params = params,
                     .figure = static_cast<double>(phase.found),
                     .unit = "lookups",
                     .bound = static_cast<double>(phase.lookups),
                     .bound_name = "all of them",
                     .side = Side::kAtLeast,
                     .target = std::nullopt,
                     .n = phase.lookups,
                     .spread = ""});
  std::size_t requests = phase.failed + phase.lookups + phase.first_ms.size();
  for (const Way way : kWays) requests += phase.of(way).size();
  figures.push_back({.run = "failed requests, " + phase.name,
                     .params = params,
                     .figure = static_cast<double>(phase.failed),
                     .unit = "requests",
                     .n = requests,
                     .spread = ""});
  return {};
}

Result<void> signal_all(DirectoryNodes& nodes, int number) {
  for (harness::RedisProcess& one : nodes.redis()) {
    if (::kill(one.process().pid(), number) != 0) return fail_errno(errno, "signal Redis");
  }
  return {};
}

/// Flushes all servers and waits until they have as many keys as before.
Result<double> flush(DirectoryNodes& nodes, std::int64_t keys) {
  for (const harness::RedisProcess& one : nodes.redis()) PEGA_TRY(one.call({"FLUSHALL"}));
  const auto begin = Clock::now();
  for (;;) {
    PEGA_TRY_LET(const std::int64_t now, nodes.stored_keys());
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (now >= keys) return seconds;
    if (seconds > 120) return fail(Errc::kTimeout, "of {} keys {} are back", keys, now);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

Result<std::vector<double>> flush_often(DirectoryNodes& nodes, const DirectoryOptions& options) {
  progress("flush all servers");
  PEGA_TRY_LET(const std::int64_t keys, nodes.stored_keys());
  Draws draws(static_cast<std::uint64_t>(options.common.seed));
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < options.flushes; ++i) {
    // Nodes look at the marker of a server every two seconds: a flush comes at any time between.
    std::this_thread::sleep_for(std::chrono::milliseconds(draws.below(2000)));
    PEGA_TRY_LET(const double one, flush(nodes, keys));
    seconds.push_back(one);
  }
  return seconds;
}

Result<std::vector<Phase>> measure_all(DirectoryNodes& nodes, const DirectoryOptions& options) {
  std::vector<Phase> phases;
  const auto add = [&](const char* name, double limit_ms) -> Phase& {
    return phases.emplace_back(Phase{.name = name, .limit_ms = limit_ms});
  };
  DirectoryOptions warm_up = options;
  warm_up.rounds = 2;
  Phase unused{.name = "to warm up"};
  measure(nodes, warm_up, unused);
  measure(nodes, options, add("directory answers", kAnswers));

  for (harness::RedisProcess& one : nodes.redis()) one.process().kill();
  measure(nodes, options, add("directory killed", kDown));
  for (harness::RedisProcess& one : nodes.redis()) PEGA_TRY(one.restart());
  PEGA_TRY(nodes.wait_until_used());
  measure(nodes, options, add("directory started again", kAnswers));

  PEGA_TRY(signal_all(nodes, SIGSTOP));
  Phase& stopped = add("directory stopped", kDown);
  stopped.has_first = true;
  measure(nodes, options, stopped);
  PEGA_TRY(signal_all(nodes, SIGCONT));
  PEGA_TRY(nodes.wait_until_used());
  return phases;
}

}  // namespace

Outcome run_directory(int argc, const char* const* argv) {
  DirectoryOptions options;
  OptionTable table("pegaflow-perf directory",
                    "Measures claims of missing keys on nodes that know each other by a directory "
                    "on real Redis servers, beside a node without: while the directory answers, "
                    "is killed and is stopped. Then measures the time until the servers have all "
                    "anchors again after FLUSHALL. All on this machine, over loopback sockets.");
  declare(table, options.common);
  table.integer("nodes", options.nodes, 2, 64, "Nodes with the directory.");
  table.integer("redis", options.redis, 1, 8, "Redis servers.");
  table.integer("keys", options.keys, 64, 8192, "Keys of a request; 640 are 10 Ki tokens.");
  table.integer("rounds", options.rounds, 5, 1000,
                "Rounds; each has a claim with the directory, two without and a lookup for each "
                "node.");
  table.integer("flushes", options.flushes, 1, 100, "Flushes of all servers.");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));

  progress(fmt::format("start {} nodes and {} Redis servers", options.nodes, options.redis));
  PEGA_TRY_LET(const auto nodes,
               DirectoryNodes::start({.program = options.common.server,
                                      .nodes = static_cast<std::size_t>(options.nodes),
                                      .redis = static_cast<std::size_t>(options.redis),
                                      .keys = static_cast<std::size_t>(options.keys),
                                      .seed = static_cast<std::uint64_t>(options.common.seed)}));
  PEGA_TRY_LET(const std::vector<Phase> phases, measure_all(*nodes, options));
  PEGA_TRY_LET(std::vector<double> flushes, flush_often(*nodes, options));
  PEGA_TRY_LET(const double anchors, nodes->sum("pegaflow_directory_anchors"));
  std::vector<Figure> figures;
  for (const Phase& phase : phases) PEGA_TRY(report(phase, options, figures));
  PEGA_TRY_LET(const Samples seconds, Samples::of(std::move(flushes)));
  figures.push_back(
      {.run = "FLUSHALL until all anchors are back",
       .params = {{"anchors", static_cast<std::int64_t>(anchors)}},
       .figure = seconds.median(),
       .unit = "s",
       .bound = 60,
       .bound_name = "its limit",
       .n = seconds.count(),
       .spread = fmt::format("{:.1f} to {:.1f} s", seconds.quantile(0), seconds.quantile(1))});
  return Report{.title = "pegaflow-perf directory, nodes and Redis on this machine",
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
