#include "engine/ssd/index.h"

#include <map>
#include <random>

#include <doctest/doctest.h>

#include "tests/support/seed.h"
#include "tests/unit/engine/ssd/ssd_fixture.h"

namespace pegaflow::engine::ssd {
namespace {

Index::Row row_of(std::uint64_t key, std::uint32_t place, std::uint16_t number = 1) {
  return {.fingerprint = fingerprint_of(number, key_of(key)),
          .proof = key + 1,
          .place = place,
          .number = number,
          .flags = 0};
}

}  // namespace

TEST_SUITE("the index of an SSD") {
  TEST_CASE("a block is found under its number only") {
    Index index = Index::create(2, 100).value();
    index.begin(0, 1);
    index.add(0, row_of(7, 1234));

    REQUIRE(index.find(1, key_of(7)));
    CHECK(index.find(1, key_of(7))->row.place == 1234);
    CHECK(index.find(1, key_of(7))->life == 1);
    CHECK_FALSE(index.find(2, key_of(7)));
    CHECK_FALSE(index.find(1, key_of(8)));
  }

  TEST_CASE("the row of the greater life counts, in either order") {
    Index index = Index::create(3, 100).value();
    index.begin(0, 5);
    index.begin(1, 6);
    index.begin(2, 4);
    index.add(0, row_of(7, 50));
    index.add(1, row_of(7, 60));
    index.add(2, row_of(7, 40));

    CHECK(index.find(1, key_of(7))->row.place == 60);
    CHECK(index.size() == 1);
    CHECK(index.check());
    index.begin(1, 7);
    CHECK_FALSE(index.find(1, key_of(7)));
  }

  TEST_CASE("a row is removed once, and a segment that begins again has none") {
    Index index = Index::create(2, 100).value();
    index.begin(0, 1);
    const Index::Place at = index.add(0, row_of(7, 1));
    index.add(0, row_of(8, 2));

    index.remove(at);
    index.remove(at);

    CHECK_FALSE(index.find(1, key_of(7)));
    CHECK(index.row(at) == nullptr);
    CHECK(index.size() == 1);
    index.begin(0, 2);
    CHECK(index.size() == 0);
    CHECK(index.check());
  }

  TEST_CASE("hits are counted up to three and keep the other flags") {
    Index index = Index::create(2, 100).value();
    index.begin(0, 1);
    Index::Row row = row_of(7, 1);
    row.flags = Entry::kHasChecksums;
    const Index::Place at = index.add(0, row);

    for (int i = 0; i < 9; ++i) index.note_hit(at);

    CHECK(index.row(at)->flags == (Entry::kHasChecksums | 3));
  }

  TEST_CASE("more rows than 32 bits can number are refused") {
    CHECK(Index::create(1U << 20, 1U << 12).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("it agrees with a map over random operations") {
    std::mt19937_64 random(testing::seed());
    constexpr std::uint32_t kSegments = 16;
    constexpr std::uint32_t kRows = 500;
    Index index = Index::create(kSegments, kRows).value();
    std::map<std::uint64_t, std::pair<std::uint32_t, std::uint32_t>> known;  // Segment, place.
    std::uint64_t life = 0;
    std::uint32_t place = 0;
    for (int step = 0; step < 400; ++step) {
      const auto segment = static_cast<std::uint32_t>(random() % kSegments);
      index.begin(segment, ++life);
      std::erase_if(known, [&](const auto& each) { return each.second.first == segment; });
      const std::uint64_t count = random() % kRows;
      for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t key = random() % 5000;
        const Index::Place at = index.add(segment, row_of(key, ++place));
        known[key] = {segment, place};
        if (random() % 20 == 0) {
          index.remove(at);
          known.erase(key);
        }
      }
    }

    REQUIRE(index.check());
    CHECK(index.size() == known.size());
    for (std::uint64_t key = 0; key < 5000; ++key) {
      const auto found = index.find(1, key_of(key));
      REQUIRE(found.has_value() == known.contains(key));
      if (found) CHECK(found->row.place == known[key].second);
    }
  }

  TEST_CASE("a block costs at most 48 bytes, however full the index is") {
    constexpr std::uint32_t kRows = 2079;
    Index index = Index::create(600, kRows).value();
    std::uint64_t key = 0;
    for (std::uint32_t segment = 0; segment < 600; ++segment) {
      index.begin(segment, segment + 1);
      for (std::uint32_t i = 0; i < kRows; ++i, ++key) index.add(segment, row_of(key, i));
      index.close(segment);
      if (segment % 50 == 49) {
        CHECK(index.memory_bytes() <= 48 * index.size());
        MESSAGE("bytes a block: ", double(index.memory_bytes()) / double(index.size()), " of ",
                index.size());
      }
    }
  }
}

}  // namespace pegaflow::engine::ssd
