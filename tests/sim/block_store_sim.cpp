// Drives the block store with random processes against a model, and checks the bytes.
//
// PEGA_SIM_STEPS sets the length (default 1,000,000 steps), PEGA_TEST_SEED repeats a run.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include <fmt/core.h>

#include "base/assert.h"
#include "tests/sim/world.h"
#include "tests/support/seed.h"

namespace {

using pegaflow::sim::Coverage;
using pegaflow::sim::Mismatch;
using pegaflow::sim::World;

constexpr std::uint64_t kStepsPerWorld = 3000;

/// The events that a run of 100,000 steps must have seen to be meaningful.
constexpr const char* kRequired[] = {"evictions, lru",
                                     "evictions, slru",
                                     "evictions, s3-fifo",
                                     "evictions, weighted-lru",
                                     "evictions, adaptive",
                                     "retired",
                                     "cleaned",
                                     "skipped, present",
                                     "skipped, refused",
                                     "skipped, no room",
                                     "claims revoked",
                                     "claims shortened",
                                     "reservations timed out",
                                     "late publishes",
                                     "lookup hit",
                                     "reserve ok",
                                     "reserve stopped",
                                     "reserve gone",
                                     "reserve busy",
                                     "reserve invalid_argument",
                                     "publish ok",
                                     "publish gone",
                                     "claim ok",
                                     "claim busy",
                                     "claim more ok",
                                     "claim more gone",
                                     "claim together ok",
                                     "claim together busy",
                                     "claim together invalid_argument",
                                     "claim together without a block or room",
                                     "open ok",
                                     "open gone",
                                     "open busy",
                                     "open invalid_argument",
                                     "open again ok",
                                     "open goes on",
                                     "open again invalid_argument",
                                     "invalidate ok",
                                     "invalidate again",
                                     "invalidate gone",
                                     "invalidate invalid_argument",
                                     "lost",
                                     "process ended",
                                     "quiesced",
                                     "reset",
                                     "cleanup",
                                     "extents taken",
                                     "shared reserve ok",
                                     "shared reserve stopped",
                                     "shared reserve gone",
                                     "shared reserve again ok",
                                     "shared reserve invalid_argument",
                                     "shared publish ok",
                                     "shared publish gone",
                                     "shared job sealed",
                                     "fetch ok",
                                     "fetch gone",
                                     "fetch busy",
                                     "fetch invalid_argument",
                                     "fetched",
                                     "fetched too late",
                                     "fetches joined",
                                     "fetches without room",
                                     "given up",
                                     "quiesced",
                                     "quiesced under a claim",
                                     "pages fetched",
                                     "pages fetched late",
                                     "evicted replicas",
                                     "opened after a fetch",
                                     "arrived all",
                                     "arrived some",
                                     "arrived gone",
                                     "arrived invalid_argument",
                                     "lend ok",
                                     "lend busy",
                                     "lease ended",
                                     "leases expired",
                                     "leases shortened",
                                     "pages read by another node",
                                     "journal",
                                     "journal lost",
                                     "wrong gone",
                                     "wrong invalid_argument"};

std::uint64_t steps_to_do() {
  const char* const given = std::getenv("PEGA_SIM_STEPS");
  return given != nullptr ? std::stoull(given) : 1000000;
}

/// True when the world behaved.
bool run_world(std::uint64_t seed, pegaflow::engine::EvictionKind eviction, std::uint64_t steps,
               Coverage& coverage) {
  // A broken invariant inside the store is a finding with a history, not the end of the process.
  const pegaflow::ThrowOnAssert guard;
  World world(seed, eviction, coverage);
  std::string what;
  try {
    for (std::uint64_t i = 0; i < steps; ++i) world.step();
    world.shut_down();
    return true;
  } catch (const Mismatch& mismatch) {
    what = mismatch.what;
  } catch (const std::exception& broken) {
    what = broken.what();
  }
  fmt::print("\nthe last calls:\n");
  for (const std::string& line : world.history()) fmt::print("  {}\n", line);
  fmt::print("FAILED: {}\n", what);
  return false;
}

}  // namespace

int main() {
  const std::uint64_t seed = pegaflow::testing::seed();
  const std::uint64_t steps = steps_to_do();
  fmt::print("seed: {} (set PEGA_TEST_SEED to repeat), {} steps\n", seed, steps);
  std::fflush(stdout);
  const auto start = std::chrono::steady_clock::now();
  Coverage coverage;
  std::uint64_t worlds = 0;
  for (std::uint64_t done = 0; done < steps; done += kStepsPerWorld) {
    // Each policy in turn.
    const auto eviction =
        pegaflow::engine::kEvictionKinds[worlds % pegaflow::engine::kEvictionKinds.size()];
    if (!run_world(seed + worlds * 0x9E3779B97F4A7C15ULL, eviction,
                   std::min(kStepsPerWorld, steps - done), coverage)) {
      fmt::print("seed: {}, world {}, steps {} to {}\n", seed, worlds, done, done + kStepsPerWorld);
      return 1;
    }
    ++worlds;
  }
  for (const auto& [what, count] : coverage.counts) fmt::print("  {:32} {:>10}\n", what, count);
  bool complete = true;
  for (const char* const what : kRequired) {
    if (coverage.counts[what] != 0 || steps < 100000) continue;
    fmt::print("FAILED: never happened: {} (seed: {})\n", what, seed);
    complete = false;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  fmt::print("{} worlds, {} steps, {:.1f} s, seed {}\n", worlds, steps, took.count(), seed);
  return complete ? 0 : 1;
}
