// Schedules of faults over a few simulated nodes: every page that an engine reads has the bytes of
// its block, no frame is reused that an engine or a card may still access, and nothing is left at
// the end.
//
// With --mistakes it breaks one rule of nodes after the other and checks that the violation is
// detected.
//
// PEGA_TEST_SEED repeats a run; PEGA_NODES_SCHEDULES is the number of schedules; without it they
// run for some seconds.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>

#include <fmt/format.h>

#include "base/assert.h"
#include "base/log.h"
#include "tests/sim/nodes_world.h"
#include "tests/support/seed.h"

namespace {

using pegaflow::sim::NodesCoverage;
using pegaflow::sim::NodesMistakes;
using pegaflow::sim::NodesWorld;

constexpr std::chrono::seconds kTime{15};
/// Events that a run of so many schedules must have caused.
constexpr std::uint64_t kEnough = 1000;
constexpr const char* kRequired[] = {"aborted",
                                     "blocks at the end",
                                     "blocks corrupt",
                                     "blocks fetched",
                                     "blocks given up",
                                     "blocks of disks restored",
                                     "blocks of disks staged",
                                     "blocks of other nodes' disks",
                                     "blocks not confirmed",
                                     "blocks retried",
                                     "blocks too late for their lease",
                                     "claims revoked",
                                     "coming",
                                     "engine gone",
                                     "evictions",
                                     "fetches joined",
                                     "fetches without room",
                                     "killed",
                                     "leases given back at the end",
                                     "leases run out",
                                     "located blocks looked at",
                                     "open: gone",
                                     "open: not yet",
                                     "opened",
                                     "paused from outside",
                                     "replicas evicted",
                                     "reservations timed out",
                                     "reset",
                                     "reset confirmed",
                                     "reset confirmed, system clocks disagree",
                                     "reset not confirmed",
                                     "saved",
                                     "saved too late",
                                     "system clock set"};

/// Mistakes that must each be detected.
struct Mistake {
  const char* what;
  NodesMistakes mistakes;
  bool is_rare = false;  ///< Takes a minute to detect: only with PEGA_RARE_MISTAKES, in the soak.
};
const Mistake kMistakes[] = {
    {"the epoch is dropped in locate", {.nodes = {.locate_drops_epoch = true}}},
    {"the epoch is dropped in lease", {.nodes = {.lease_drops_epoch = true}}},
    {"a disk drops the epoch", {.nodes = {.disks = {.drops_epoch = true}}}},
    {"a fetch continues after a reset", {.fetches = {.forgets_generation = true}}},
    {"blocks are sealed without a confirmation",
     {.source = {.skips_confirmation = true}, .outlived_leases = 40},
     true},
};
constexpr std::uint64_t kMistakeSchedules = 20000;

/// True if it was detected within so many schedules.
bool finds(const Mistake& mistake, std::uint64_t seed, kj::WaitScope& scope) {
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t done = 0; done < kMistakeSchedules; ++done) {
    const pegaflow::ThrowOnAssert guard;
    NodesCoverage coverage;
    auto world = std::make_unique<NodesWorld>(seed + done * 0x9E3779B97F4A7C15ULL, scope, coverage,
                                              mistake.mistakes);
    try {
      world->run();
    } catch (const std::exception& broken) {
      // A world that is stopped in the middle may be unable to end.
      (void)world.release();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      fmt::print("found: {}, schedule {}, {:.1f} s: {}\n", mistake.what, done, took.count(),
                 broken.what());
      return true;
    }
  }
  fmt::print("FAILED: not found: {}\n", mistake.what);
  return false;
}

/// True if the schedule ran without a finding.
bool run_schedule(std::uint64_t seed, kj::WaitScope& scope, NodesCoverage& coverage) {
  // A broken invariant of ours is a finding with a history, not the end of the process.
  const pegaflow::ThrowOnAssert guard;
  NodesWorld world(seed, scope, coverage);
  std::string what;
  try {
    world.run();
    return true;
  } catch (const std::exception& broken) {
    what = broken.what();
  }
  for (const std::string& line : world.history()) fmt::print("  {}\n", line);
  fmt::print("FAILED: {}\n", what);
  std::fflush(stdout);
  // A world that is stopped in the middle may be unable to end.
  std::_Exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const bool plants = argc == 2 && std::string(argv[1]) == "--mistakes";
  const std::uint64_t seed = pegaflow::testing::seed();
  const char* const given = std::getenv("PEGA_NODES_SCHEDULES");
  const std::uint64_t most = given != nullptr ? std::stoull(given) : ~std::uint64_t{0};
  fmt::print("seed: {} (set PEGA_TEST_SEED to repeat)\n", seed);
  pegaflow::set_log_sink([](pegaflow::LogLevel, std::string_view) {});
  kj::EventLoop loop;
  kj::WaitScope scope(loop);
  if (plants) {
    bool all = true;
    const bool with_rare = std::getenv("PEGA_RARE_MISTAKES") != nullptr;
    for (const Mistake& mistake : kMistakes) {
      if (with_rare || !mistake.is_rare) all = finds(mistake, seed, scope) && all;
    }
    std::fflush(stdout);
    std::_Exit(all ? 0 : 1);  // Worlds are left in the middle.
  }
  const auto start = std::chrono::steady_clock::now();
  NodesCoverage coverage;
  std::uint64_t done = 0;
  while (done < most && (given != nullptr || std::chrono::steady_clock::now() - start < kTime)) {
    const std::uint64_t one = seed + done * 0x9E3779B97F4A7C15ULL;
    fmt::print(stderr, "\rschedule {} (PEGA_TEST_SEED={} PEGA_NODES_SCHEDULES=1)", done, one);
    if (!run_schedule(one, scope, coverage)) return 1;
    ++done;
  }
  for (const auto& [what, count] : coverage) fmt::print("  {:32} {:>10}\n", what, count);
  bool complete = true;
  for (const char* const what : kRequired) {
    if (coverage[what] != 0 || done < kEnough) continue;
    fmt::print("FAILED: never happened: {} (seed: {})\n", what, seed);
    complete = false;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  fmt::print("{} schedules, {:.1f} s, seed {}\n", done, took.count(), seed);
  return complete ? 0 : 1;
}
