#include "engine/tables/flat_index.h"

#include <map>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

namespace pegaflow::engine {
namespace {

const auto kAny = [](std::uint32_t) { return true; };

TEST_SUITE("FlatIndex") {
  TEST_CASE("rows with one hash are distinguished by their keys") {
    auto index = FlatIndex::create(8);
    REQUIRE(index);
    index->insert(5, 1);
    index->insert(5, 2);
    CHECK(index->find(5, [](std::uint32_t row) { return row == 2; }) == 2);
    CHECK(index->find(5, [](std::uint32_t row) { return row == 3; }) == FlatIndex::kNone);
    CHECK(index->find(6, kAny) == FlatIndex::kNone);
    CHECK(index->erase(5, 1));
    CHECK_FALSE(index->erase(5, 1));
    CHECK(index->find(5, kAny) == 2);
  }

  TEST_CASE("an index for 0 rows is empty") {
    auto index = FlatIndex::create(0);
    REQUIRE(index);
    CHECK(index->find(0, kAny) == FlatIndex::kNone);
    CHECK_FALSE(index->erase(0, 0));
  }

  TEST_CASE("full to its limit and churned at random, it finds exactly its content") {
    constexpr std::uint32_t kRows = 64;
    auto index = FlatIndex::create(kRows);
    REQUIRE(index);
    std::mt19937_64 random(testing::seed());
    std::map<std::uint32_t, std::uint32_t> hash_of;
    for (int step = 0; step < 200'000; ++step) {
      const auto row = static_cast<std::uint32_t>(random() % kRows);
      if (const auto found = hash_of.find(row); found != hash_of.end()) {
        REQUIRE(index->erase(found->second, row));
        hash_of.erase(found);
      } else {
        // Few hashes, some at the end of the table: long runs that wrap around.
        const auto hash =
            static_cast<std::uint32_t>(random() % 24 == 0 ? ~std::uint32_t{0} : random() % 40);
        index->insert(hash, row);
        hash_of[row] = hash;
      }
      REQUIRE(index->size() == hash_of.size());
      const auto probe = static_cast<std::uint32_t>(random() % kRows);
      const auto known = hash_of.find(probe);
      const auto is_probe = [&](std::uint32_t each) { return each == probe; };
      REQUIRE(index->find(known != hash_of.end() ? known->second : 7, is_probe) ==
              (known != hash_of.end() ? probe : FlatIndex::kNone));
    }
  }
}

}  // namespace
}  // namespace pegaflow::engine
