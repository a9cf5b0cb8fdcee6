// The proof of a row: a part of the format that the next server reads.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>

#include <doctest/doctest.h>

#include "engine/kept/kept_tables.h"
#include "engine/types/hash.h"
#include "tests/support/seed.h"

namespace pegaflow::engine {
namespace {

/// The members that a proof covers, in the order of its bytes.
struct Covered {
  BlockKey key;
  std::uint64_t extent = 0;
  std::uint32_t row = 0;
  std::uint32_t space = 0;
  std::uint32_t owner = 0;
  std::uint32_t sealed_s = 0;
};
static_assert(sizeof(Covered) == 56);

Covered draw(std::mt19937_64& random) {
  Covered drawn;
  for (std::byte& each : drawn.key.bytes) each = static_cast<std::byte>(random());
  drawn.extent = random();
  drawn.row = static_cast<std::uint32_t>(random());
  drawn.space = static_cast<std::uint32_t>(random());
  drawn.owner = static_cast<std::uint32_t>(random());
  drawn.sealed_s = static_cast<std::uint32_t>(random());
  return drawn;
}

std::uint64_t proof_of(const Covered& covered) {
  Block block;
  block.key = covered.key;
  block.space = SpaceId{covered.space};
  block.owner = covered.owner;
  block.sealed_s = covered.sealed_s;
  // What it does not cover.
  block.last_use = 7;
  block.holds = 3;
  block.used = 1;
  return row_proof(block, covered.row, covered.extent);
}

TEST_SUITE("row_proof") {
  TEST_CASE("the proof of a row is the hash of all that it covers") {
    std::mt19937_64 random(testing::seed());
    for (int i = 0; i < 1000; ++i) {
      const Covered covered = draw(random);
      CHECK(proof_of(covered) == hash64(std::as_bytes(std::span(&covered, 1))));
    }
  }

  TEST_CASE("the proof of an empty row is the one of every release") {
    CHECK(proof_of({}) == 0xA09FD01DACF4D826ULL);
  }
}

}  // namespace
}  // namespace pegaflow::engine
