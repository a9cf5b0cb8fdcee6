#include "directory/probes.h"

#include <cstring>
#include <random>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "directory/anchor.h"
#include "tests/support/seed.h"

namespace pegaflow::directory {
namespace {

std::vector<BlockKey> prompt(std::mt19937_64& random, std::size_t blocks) {
  std::vector<BlockKey> keys(blocks);
  for (BlockKey& key : keys) {
    const std::uint64_t word = random();
    std::memcpy(key.bytes.data(), &word, sizeof word);
  }
  return keys;
}

/// The place of the last block that two rounds find when an owner has the first `owned` blocks;
/// -1: none.
std::int64_t found_place(const std::vector<Candidate>& candidates, std::size_t owned,
                         std::size_t& asked) {
  auto probed = first_probes(candidates);
  asked = probed.size();
  CHECK(probed.size() <= kFirstProbes);
  const auto answer = [&](const std::vector<std::size_t>& probes) {
    std::vector<bool> found;
    for (const std::size_t i : probes) found.push_back(candidates[i].place < owned);
    return found;
  };
  auto found = answer(probed);
  const auto more = second_probes(candidates, probed, found);
  asked += more.size();
  probed.insert(probed.end(), more.begin(), more.end());
  found = answer(probed);
  std::int64_t last = -1;
  for (std::size_t i = 0; i < probed.size(); ++i) {
    if (found[i]) last = std::max<std::int64_t>(last, candidates[probed[i]].place);
  }
  return last;
}

TEST_SUITE("probes") {
  TEST_CASE("two rounds of 32 anchors find an owner that has any anchor of the prompt") {
    std::mt19937_64 random(testing::seed());
    std::size_t exact = 0;
    std::size_t rounds = 0;
    for (int round = 0; round < 2000; ++round) {
      const auto keys = prompt(random, 1 + random() % 4000);
      const auto candidates = candidates_of(keys);
      const std::size_t owned = random() % (keys.size() + 1);
      std::int64_t best = -1;
      for (const Candidate& each : candidates) {
        if (each.place < owned) best = each.place;
      }
      std::size_t asked = 0;
      const std::int64_t last = found_place(candidates, owned, asked);
      CHECK(asked <= kMostProbes);
      CHECK((last >= 0) == (best >= 0));
      ++rounds;
      exact += last == best ? 1 : 0;
      // Of a long prompt the second round has every second or third anchor of the gap.
      CHECK(best - last <= 400);
    }
    CHECK(exact * 100 > rounds * 70);
  }

  TEST_CASE("nothing more is asked when no anchor of the first round has an owner") {
    std::mt19937_64 random(1);
    const auto candidates = candidates_of(prompt(random, 1000));
    const auto probed = first_probes(candidates);
    CHECK(second_probes(candidates, probed, std::vector<bool>(probed.size())).empty());
    CHECK(first_probes({}).empty());
  }

  TEST_CASE("a prompt of any length has a bounded number of candidates") {
    std::mt19937_64 random(2);
    CHECK(candidates_of(prompt(random, 50'000)).size() == 512);
    CHECK(candidates_of({}).empty());
  }
}

}  // namespace
}  // namespace pegaflow::directory
