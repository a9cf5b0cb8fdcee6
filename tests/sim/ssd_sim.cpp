// Random schedules of one disk of the SSD tier over a simulated drive. PEGA_SSD_SCHEDULES sets
// their number.
#include <chrono>
#include <cstdlib>
#include <functional>

#include <doctest/doctest.h>

#include "base/log.h"
#include "tests/sim/ssd_world.h"
#include "tests/support/seed.h"

namespace pegaflow::server {
namespace {

std::uint64_t schedules() {
  const char* const text = std::getenv("PEGA_SSD_SCHEDULES");
  return text == nullptr ? 1000 : std::strtoull(text, nullptr, 10);
}

/// Plants one bug; returns the number of schedules until it was detected.
std::uint64_t find_mistake(const std::function<void(SsdDisk::Options::Mistakes&)>& plant) {
  SsdDisk::Options::Mistakes mistakes;
  plant(mistakes);
  SsdWorld::Counts counts;
  constexpr std::uint64_t kMost = 20000;
  for (std::uint64_t i = 0; i < kMost; ++i) {
    SsdWorld world(testing::seed() + i, mistakes, {.reset = 1, .restart = 0.5}, counts);
    if (const std::string found = world.run(); !found.empty()) {
      MESSAGE("found after ", i + 1, " schedules: ", found);
      return i + 1;
    }
  }
  return 0;
}

}  // namespace

TEST_SUITE("a simulated SSD") {
  TEST_CASE("no schedule delivers a wrong, stale or unproven block") {
    set_log_level(LogLevel::kOff);  // Faults are what it is about.
    SsdWorld::Counts counts;
    for (std::uint64_t i = 0; i < schedules(); ++i) {
      SsdWorld world(testing::seed() + i, {}, {}, counts);
      const std::string violation = world.run();
      INFO("seed ", testing::seed() + i);
      REQUIRE(violation == "");
    }
    MESSAGE(counts.schedules, " schedules, ", counts.writes, " writes, ", counts.kept, " kept, ",
            counts.loads, " loads, ", counts.proven, " proven, ", counts.failed_proofs,
            " failed proofs, ", counts.damaged, " damaged before their write, ", counts.drops,
            " drops, ", counts.resets, " resets, ", counts.kills, " kills, ", counts.power_cuts,
            " power cuts, ", counts.faults, " faults, ", counts.durable_checks,
            " checks of what was flushed");
    CHECK(counts.proven > counts.schedules / 10);
    CHECK(counts.failed_proofs > 0);
    CHECK(counts.damaged > 0);
    CHECK(counts.drops > 0);
    CHECK(counts.durable_checks > 0);
  }

  TEST_CASE("schedules in which a header is written late lose no block that was flushed") {
    // The header hung while its segment was dropped and used again.
    set_log_level(LogLevel::kOff);
    SsdWorld::Counts counts;
    for (const std::uint64_t seed :
         {3841624663U, 3840824938U, 3840948991U, 3841579759U, 3840749519U}) {
      SsdWorld world(seed, {}, {}, counts);
      INFO("seed ", seed);
      CHECK(world.run() == "");
    }
  }

  TEST_CASE("a block that is delivered without its proof is found") {
    CHECK(find_mistake([](auto& mistakes) { mistakes.skips_proof = true; }) != 0);
  }

  TEST_CASE("a reset that is confirmed before it is durable is found") {
    CHECK(find_mistake([](auto& mistakes) { mistakes.epoch_not_flushed = true; }) != 0);
  }

  TEST_CASE("a write that is kept although its memory changed is found") {
    CHECK(find_mistake([](auto& mistakes) { mistakes.keeps_forgotten = true; }) != 0);
  }

  TEST_CASE("a block that is kept although it differs from its writer's is found") {
    CHECK(find_mistake([](auto& mistakes) { mistakes.keeps_damaged = true; }) != 0);
  }

  TEST_CASE("a scan that finds dropped blocks is found") {
    CHECK(find_mistake([](auto& mistakes) { mistakes.drop_spares_scan = true; }) != 0);
  }
}

}  // namespace pegaflow::server
