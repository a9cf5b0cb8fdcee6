#include "engine/ssd/segment_log.h"

#include <doctest/doctest.h>

#include "tests/unit/engine/ssd/ssd_fixture.h"

namespace pegaflow::engine::ssd {

TEST_SUITE("the log of segments") {
  TEST_CASE("blocks lie behind one another until the segment is full") {
    const Superblock disk = small_disk();
    SegmentLog log(disk);
    CHECK_FALSE(log.take(kSector));
    log.open(log.next().value(), 1);

    const auto first = log.take(64 << 10);
    const auto second = log.take(64 << 10);

    REQUIRE(first);
    REQUIRE(second);
    CHECK(first->offset == disk.segment_offset(0) + disk.head_bytes());
    CHECK(second->offset == first->offset + (64 << 10));
    while (log.take(64 << 10)) {
    }
    CHECK(log.in_flight() == 16);  // The header, too.
    CHECK_FALSE(log.header_written(0));
    CHECK(log.in_flight() == 15);
  }

  TEST_CASE("a table page names only blocks that are written") {
    SegmentLog log(small_disk());
    log.open(0, 1);
    const auto a = log.take(kSector).value();
    const auto b = log.take(kSector).value();
    CHECK_FALSE(log.next_table(true));

    log.wrote(b, {.key = key_of(2)});

    const auto table = log.next_table(true);
    REQUIRE(table);
    REQUIRE(table->page.entries.size() == 1);
    CHECK(table->page.entries[0].key == key_of(2));
    CHECK(table->page.life == 1);
    CHECK_FALSE(log.next_table(true));  // One page of a segment at a time.
    log.wrote(a, {.key = key_of(1)});
    CHECK_FALSE(log.table_written(0));
    CHECK(log.next_table(true)->page.entries.size() == 2);  // The same page, with both.
  }

  TEST_CASE("full pages need no waiting, others do") {
    SegmentLog log(divide(kDisk, kLogOffset + (64 << 20), 16 << 20).value());
    log.open(0, 1);
    for (std::uint32_t i = 0; i <= kEntriesPerPage; ++i) {
      const auto room = log.take(kSector).value();
      log.wrote(room, {.key = key_of(i)});
    }

    const auto full = log.next_table(false);
    REQUIRE(full);
    CHECK(full->page.page == 0);
    CHECK(full->page.entries.size() == kEntriesPerPage);
    log.table_written(0);
    CHECK_FALSE(log.next_table(false));
    const auto rest = log.next_table(true);
    REQUIRE(rest);
    CHECK(rest->page.page == 1);
    CHECK(rest->page.entries.size() == 1);
  }

  TEST_CASE("a closed segment is complete when its writes and its pages have ended") {
    SegmentLog log(small_disk());
    log.open(0, 1);
    log.header_written(0);
    const auto a = log.take(kSector).value();
    const auto b = log.take(kSector).value();
    log.close();
    log.wrote(a, {.key = key_of(1)});
    CHECK_FALSE(log.next_table(false));  // A write is in flight.
    CHECK(log.closed_segments() == 0);

    log.lost(b);

    REQUIRE(log.next_table(false));
    CHECK(log.table_written(0));
    CHECK(log.closed_segments() == 1);
  }

  TEST_CASE("free segments are used first, then the one with the smallest life") {
    SegmentLog log(small_disk(3));
    log.found(0, 20);
    log.found(2, 10);
    CHECK(log.next() == 1);
    log.open(1, 21);
    log.header_written(1);
    log.close();

    CHECK(log.next() == 2);
  }

  TEST_CASE("a segment that is being read is not used again") {
    SegmentLog log(small_disk(2));
    log.found(0, 1);
    log.found(1, 2);
    log.begin_read(0);
    CHECK(log.next() == 1);
    log.begin_read(1);
    CHECK_FALSE(log.next());

    log.end_read(0);

    CHECK(log.next() == 0);
  }

  TEST_CASE(
      "the oldest segment that is not read can be dropped, and then the rest is all there is") {
    SegmentLog log(small_disk(10));
    for (std::uint32_t segment = 0; segment < 6; ++segment) log.found(segment, 10 + segment);
    CHECK_FALSE(log.is_leaving(10));
    log.begin_read(0);

    CHECK(log.drop_oldest() == 1);
    CHECK(log.free_segments() == 5);
    CHECK(log.closed_segments() == 5);
    // Two fifths of the five that hold blocks.
    CHECK(log.is_leaving(10));
    CHECK(log.is_leaving(12));
    CHECK_FALSE(log.is_leaving(13));
    log.end_read(0);
    CHECK(log.drop_oldest() == 0);
    for (int i = 0; i < 4; ++i) CHECK(log.drop_oldest());
    CHECK_FALSE(log.drop_oldest());
  }

  TEST_CASE("the oldest segments are leaving once less than two fifths are filled before them") {
    SegmentLog log(small_disk(10));
    std::uint64_t life = 1000;  // Lives jump with each opening of the file.
    for (std::uint32_t i = 0; i < 7; ++i) {
      log.found(i, life);
      CHECK_FALSE(log.is_leaving(life));
      life *= 2;
    }
    // Seven segments hold blocks, the eighth is opened: two free ones and two others come next.
    log.open(7, life);

    CHECK(log.is_leaving(1000));
    CHECK(log.is_leaving(2000));
    CHECK_FALSE(log.is_leaving(4000));
    CHECK_FALSE(log.is_leaving(life));

    log.drop_all();
    CHECK_FALSE(log.is_leaving(1000));
  }

  TEST_CASE("a segment whose blocks are being written is not used again") {
    SegmentLog log(small_disk(2));
    log.open(0, 1);
    log.header_written(0);
    (void)log.take(kSector);
    log.close();
    CHECK(log.next() == 1);
    log.open(1, 2);
    log.header_written(1);
    (void)log.take(kSector);
    log.close();

    CHECK_FALSE(log.next());
  }

  TEST_CASE("a segment whose header is being written is not used again") {
    SegmentLog log(small_disk(2));
    log.found(1, 1);
    log.open(0, 2);
    const auto room = log.take(kSector).value();
    log.wrote(room, {.key = key_of(1)});
    log.close();
    REQUIRE(log.next_table(false));

    CHECK_FALSE(log.table_written(0));
    log.drop_all();
    CHECK(log.next() == 1);
    log.begin_read(1);
    CHECK_FALSE(log.next());
    CHECK(log.in_flight() == 1);

    CHECK(log.header_written(0));

    CHECK(log.in_flight() == 0);
    CHECK(log.next() == 0);
  }
}

}  // namespace pegaflow::engine::ssd
