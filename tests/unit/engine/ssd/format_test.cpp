#include "engine/ssd/format.h"

#include <array>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/engine/ssd/ssd_fixture.h"

namespace pegaflow::engine::ssd {

TEST_SUITE("the format of an SSD") {
  using Page = std::array<std::byte, kSector>;

  TEST_CASE("a disk is divided into segments behind its first MiB") {
    const auto divided = divide(kDisk, (std::uint64_t{1} << 30) + 12345, std::uint64_t{128} << 20);

    REQUIRE(divided);
    CHECK(divided->segments == 7);
    CHECK(divided->table_pages == 33);  // 2,048 blocks of 64 KiB.
    CHECK(divided->end() <= std::uint64_t{1} << 30);
    CHECK(divide(kDisk, 1 << 20, 1 << 20).error().code == Errc::kInvalidArgument);
    CHECK(divide(kDisk, 1 << 30, 4096).error().code == Errc::kInvalidArgument);
    CHECK(divide(kDisk, 1 << 30, (1 << 20) + 1).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a superblock is read back, and any changed bit of it is noticed") {
    Superblock superblock = small_disk();
    superblock.sequence = 7;
    superblock.opened = 3;
    superblock.first_life = 99;
    Page page{};

    encode(superblock, page);

    REQUIRE(decode_superblock(page));
    CHECK(*decode_superblock(page) == superblock);
    for (const std::size_t at : {std::size_t{8}, std::size_t{30}, std::size_t{60}, kSector - 1}) {
      Page damaged = page;
      damaged[at] ^= std::byte{4};
      CHECK(decode_superblock(damaged).error().code == Errc::kCorrupt);
    }
  }

  TEST_CASE("a foreign first page and an empty one are different errors") {
    Page page{};
    CHECK(decode_superblock(page).error().code == Errc::kGone);

    page[0] = std::byte{'E'};

    CHECK(decode_superblock(page).error().code == Errc::kRefused);
  }

  TEST_CASE("the newer of two valid superblocks counts") {
    Superblock old = small_disk();
    Superblock last = old;
    last.sequence = old.sequence + 1;
    const Result<Superblock> damaged = fail(Errc::kCorrupt, "damaged");

    CHECK(newer(old, last)->sequence == last.sequence);
    CHECK(newer(last, old)->sequence == last.sequence);
    CHECK(newer(damaged, old)->sequence == old.sequence);
    CHECK(newer(damaged, damaged).error().code == Errc::kCorrupt);
  }

  TEST_CASE("names are read back, and those of another disk or with one number twice are not") {
    Names names{.sequence = 5, .next_number = 12, .records = {}};
    for (std::uint16_t i = 0; i < kMostNames; ++i) {
      SpaceName name{};
      name[0] = static_cast<std::byte>(i);
      name[1] = static_cast<std::byte>(i >> 8);
      names.records.push_back({.origin = {.name = name, .kind = i, .epoch = {i, 7}},
                               .number = static_cast<std::uint16_t>(i + 1),
                               .used_at = i});
    }
    std::vector<std::byte> bytes(kNamesBytes);
    const std::span<std::byte, kNamesBytes> area(bytes.data(), kNamesBytes);

    encode(names, kDisk, area);

    const auto decoded = decode_names(area, kDisk);
    REQUIRE(decoded);
    CHECK(decoded->records == names.records);
    CHECK(decoded->next_number == 12);
    CHECK_FALSE(decode_names(area, Id128{1, 1}));
    names.records[1].number = names.records[0].number;
    encode(names, kDisk, area);
    CHECK_FALSE(decode_names(area, kDisk));
  }

  TEST_CASE("a table page keeps whole entries, and a torn one is no page") {
    TablePage table{.life = 9, .page = 2, .entries = {}};
    for (std::uint32_t i = 0; i < kEntriesPerPage; ++i) {
      table.entries.push_back({.key = key_of(i),
                               .proof = i + 1,
                               .place = 1000 + i,
                               .units = 3,
                               .number = 4,
                               .kind = 5,
                               .depth = Entry::kUnknownDepth,
                               .flags = Entry::kHits,
                               .saved_at = 77});
    }
    Page page{};

    encode(table, kDisk, page);

    const auto decoded = decode_table_page(page, kDisk);
    REQUIRE(decoded);
    CHECK(decoded->life == 9);
    CHECK(decoded->page == 2);
    CHECK(decoded->entries == table.entries);
    std::fill(page.begin() + 512, page.begin() + 1024,
              std::byte{0});  // One sector of a torn write.
    CHECK_FALSE(decode_table_page(page, kDisk));
  }

  TEST_CASE("an entry lies in its segment, behind the table") {
    const Superblock disk = small_disk();
    const auto first =
        static_cast<std::uint32_t>((disk.segment_offset(1) + disk.head_bytes()) / kSector);
    const auto end = static_cast<std::uint32_t>(disk.segment_offset(2) / kSector);

    CHECK(lies_in({.place = first, .units = 1}, disk, 1));
    CHECK(lies_in({.place = end - 2, .units = 2}, disk, 1));
    CHECK_FALSE(lies_in({.place = first - 1, .units = 1}, disk, 1));
    CHECK_FALSE(lies_in({.place = end - 2, .units = 3}, disk, 1));
    CHECK_FALSE(lies_in({.place = first, .units = 0}, disk, 1));
    CHECK_FALSE(lies_in({.place = first, .units = 1}, disk, 2));
    CHECK_FALSE(lies_in({.place = ~0U, .units = ~0U}, disk, 3));
  }
}

}  // namespace pegaflow::engine::ssd
