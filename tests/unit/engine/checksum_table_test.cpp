#include "engine/frames/checksum_table.h"

#include <doctest/doctest.h>

namespace pegaflow::engine {
namespace {

TEST_SUITE("ChecksumTable") {
  TEST_CASE("it costs nothing before the first checksum, then 8 bytes a page") {
    ChecksumTable table(1'000'000);
    table.clear(7);
    table.set(7, ChecksumTable::kNone);
    CHECK(table.memory_bytes() == 0);
    CHECK(table[7] == ChecksumTable::kNone);

    table.set(9, 42);

    CHECK(table[9] == 42);
    CHECK(table[8] == ChecksumTable::kNone);
    CHECK(table[10] == ChecksumTable::kNone);
    CHECK(table.memory_bytes() == 8);
    CHECK_FALSE(table.is_empty());
  }

  TEST_CASE("a page that was cleared has none") {
    ChecksumTable table(16);
    table.set(3, 1);
    table.set(3, 2);
    CHECK(table[3] == 2);
    table.clear(3);
    table.clear(4);
    CHECK(table[3] == ChecksumTable::kNone);
    CHECK(table.is_empty());
  }

  TEST_CASE("unknown numbers are ignored") {
    ChecksumTable table(4);
    table.set(~0U, 1);
    table.set(4, 1);
    table.clear(~0U);
    CHECK(table[~0U] == ChecksumTable::kNone);
    CHECK(table.memory_bytes() == 0);
  }

  TEST_CASE("without memory nothing is kept, and nothing breaks") {
    ChecksumTable table(std::uint64_t{1} << 60);
    table.set(3, 1);
    table.set(3, 1);
    CHECK(table[3] == ChecksumTable::kNone);
    CHECK(table.memory_bytes() == 0);
  }
}

}  // namespace
}  // namespace pegaflow::engine
