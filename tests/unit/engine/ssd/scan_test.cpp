#include "engine/ssd/scan.h"

#include <functional>

#include <doctest/doctest.h>

#include "tests/unit/engine/ssd/ssd_fixture.h"

namespace pegaflow::engine::ssd {
namespace {

/// Blocks whose table has four pages, the last one with five entries.
constexpr std::uint64_t kFourPages = 3 * kEntriesPerPage + 5;

/// A disk with two segments of 100 blocks each, of which the second has newer copies of 50.
struct Written {
  Written() {
    number = names.number({.name = name_of(1), .kind = 0, .epoch = {}}, 1).value();
    fill(0, 5, 0);
    fill(1, 6, 50);
  }
  void fill(std::uint32_t segment, std::uint64_t life, std::uint64_t first,
            std::uint64_t blocks = 100) {
    encode(SegmentHeader{.segment = segment, .life = life}, kDisk,
           image.page(disk.segment_offset(segment)));
    for (std::uint32_t page = 0; page * kEntriesPerPage <= blocks; ++page) {
      TablePage table{.life = life, .page = page, .entries = {}};
      for (std::uint64_t i = page * kEntriesPerPage;
           i < blocks && table.entries.size() < kEntriesPerPage; ++i) {
        table.entries.push_back(
            {.key = key_of(first + i),
             .proof = life,
             .place = static_cast<std::uint32_t>(
                 (disk.segment_offset(segment) + disk.head_bytes()) / kSector + i),
             .units = 1,
             .number = number});
      }
      encode(table, kDisk, image.page(disk.segment_offset(segment) + (1 + page) * kSector));
    }
  }
  /// Runs a whole scan.
  Scan::Counts scan(const std::function<bool(const Scan::Read&)>& fails = {}) {
    Scan scan(disk, names, index, log);
    while (const auto read = scan.next()) {
      if (fails && fails(*read)) {
        scan.failed(*read);
      } else {
        scan.take(*read, image.at(read->offset, read->bytes));
      }
    }
    CHECK(scan.is_done());
    CHECK(index.check());
    return scan.counts();
  }

  Superblock disk = divide(kDisk, kLogOffset + (64 << 20), 16 << 20).value();
  Image image{disk};
  NameTable names;
  std::uint16_t number = 0;
  Index index = Index::create(disk.segments, disk.most_entries()).value();
  SegmentLog log{disk};
};

}  // namespace

TEST_SUITE("the scan of an SSD") {
  TEST_CASE("it finds all blocks, the newer copy of each") {
    Written f;

    const Scan::Counts counts = f.scan();

    CHECK(counts.blocks == 200);
    CHECK(f.index.size() == 150);
    CHECK(f.index.find(f.number, key_of(10))->life == 5);
    CHECK(f.index.find(f.number, key_of(60))->life == 6);
    CHECK(f.log.closed_segments() == 2);
    CHECK(f.log.free_segments() == f.disk.segments - 2);
  }

  TEST_CASE("a damaged page ends its segment there") {
    Written f;
    f.image.page(f.disk.segment_offset(0) + kSector)[100] ^= std::byte{1};

    const Scan::Counts counts = f.scan();

    CHECK(counts.damaged_pages == 1);
    CHECK_FALSE(f.index.find(f.number, key_of(10)));
    CHECK(f.index.find(f.number, key_of(99)));  // Its copy in the other segment.
  }

  TEST_CASE("a segment whose header was damaged or lost is free") {
    Written f;
    f.image.page(f.disk.segment_offset(1))[50] ^= std::byte{1};

    f.scan();

    CHECK(f.index.size() == 100);
    CHECK(f.log.closed_segments() == 1);
  }

  TEST_CASE("pages of a former life are not the segment's") {
    Written f;
    encode(SegmentHeader{.segment = 1, .life = 7}, kDisk, f.image.page(f.disk.segment_offset(1)));

    f.scan();

    CHECK(f.index.size() == 100);
  }

  TEST_CASE("blocks of a former epoch are dead") {
    Written f;
    f.names.reset(name_of(1), {1, 1});

    const Scan::Counts counts = f.scan();

    CHECK(counts.dead == 200);
    CHECK(f.index.size() == 0);
  }

  TEST_CASE("segments before the first life that counts are free") {
    Written f;
    f.disk.first_life = 6;

    f.scan();

    CHECK(f.index.size() == 100);
    CHECK(f.log.closed_segments() == 1);
  }

  TEST_CASE("a read that fails costs one segment") {
    Written f;

    const Scan::Counts counts = f.scan([](const Scan::Read& read) { return read.segment == 0; });

    CHECK(counts.failed_reads == 1);
    CHECK(f.index.size() == 100);
  }

  TEST_CASE("the rest of a table is read only where it is used, and after a long one at once") {
    Written f;
    f.fill(2, 8, 1000, kFourPages);
    std::uint32_t longer = 0;
    std::uint32_t at_once = 0;

    f.scan([&](const Scan::Read& read) {
      longer += read.first_page != 0 ? 1 : 0;
      at_once += read.first_page == 0 && read.bytes == f.disk.head_bytes() ? 1 : 0;
      return false;
    });

    CHECK(longer == 1);
    CHECK(at_once == f.disk.segments - 3);
    CHECK(f.index.find(f.number, key_of(1000 + 3 * kEntriesPerPage + 4)));
  }

  TEST_CASE("a bad sector of a table that is read at once costs the pages from it on") {
    Written f;
    f.fill(2, 8, 1000, kFourPages);
    f.fill(3, 8, 2000, kFourPages);
    const std::uint64_t bad = f.disk.segment_offset(3) + 4 * kSector;  // The fourth page.

    f.scan([&](const Scan::Read& read) {
      return read.offset <= bad && bad < read.offset + read.bytes;
    });

    CHECK(f.index.find(f.number, key_of(1000 + 3 * kEntriesPerPage + 4)));
    CHECK(f.index.find(f.number, key_of(2000 + 3 * kEntriesPerPage - 1)));
    CHECK_FALSE(f.index.find(f.number, key_of(2000 + 3 * kEntriesPerPage)));
  }
}

}  // namespace pegaflow::engine::ssd
