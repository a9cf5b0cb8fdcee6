// Schedules of faults over a few simulated nodes: every page that an engine reads has the bytes of
// its block, no frame is given out that somebody may still touch, and nothing is left at the end.
//
// PEGA_TEST_SEED repeats a run; PEGA_NODES_SCHEDULES says how many schedules, and without it they
// go on for some seconds.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include <fmt/format.h>

#include "base/assert.h"
#include "base/log.h"
#include "tests/sim/nodes_world.h"
#include "tests/support/seed.h"

namespace {

using pegaflow::sim::NodesCoverage;
using pegaflow::sim::NodesWorld;

constexpr std::chrono::seconds kTime{15};
/// What a run of so many schedules has seen, each of these.
constexpr std::uint64_t kEnough = 1000;
constexpr const char* kRequired[] = {"aborted",
                                     "blocks at the end",
                                     "blocks corrupt",
                                     "blocks fetched",
                                     "blocks given up",
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
                                     "open: gone",
                                     "open: not yet",
                                     "opened",
                                     "replicas evicted",
                                     "reservations timed out",
                                     "reset",
                                     "saved",
                                     "saved too late"};

/// True when all was as it should be.
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
  // A world in the middle of something may not be able to end.
  std::_Exit(1);
}

}  // namespace

int main() {
  const std::uint64_t seed = pegaflow::testing::seed();
  const char* const given = std::getenv("PEGA_NODES_SCHEDULES");
  const std::uint64_t most = given != nullptr ? std::stoull(given) : ~std::uint64_t{0};
  fmt::print("seed: {} (set PEGA_TEST_SEED to repeat)\n", seed);
  pegaflow::set_log_sink([](pegaflow::LogLevel, std::string_view) {});
  kj::EventLoop loop;
  kj::WaitScope scope(loop);
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
