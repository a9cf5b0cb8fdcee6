#include "engine/ssd/names.h"

#include <doctest/doctest.h>

#include "tests/unit/engine/ssd/ssd_fixture.h"

namespace pegaflow::engine::ssd {

TEST_SUITE("the namespaces of an SSD") {
  TEST_CASE("a namespace keeps its number until a reset, and never gets it back") {
    NameTable names;
    const Origin before{.name = name_of(1), .kind = 0, .epoch = {}};
    Origin after = before;
    after.epoch = {5, 6};
    const std::uint16_t first = names.number(before, 10).value();

    CHECK(names.number(before, 11) == first);
    CHECK(names.reset(name_of(1), {5, 6}));

    CHECK_FALSE(names.find(name_of(1), {}));
    CHECK_FALSE(names.number(before, 12));
    CHECK(names.origin(first) == nullptr);
    const std::uint16_t second = names.number(after, 13).value();
    CHECK(second != first);
    CHECK(names.find(name_of(1), {5, 6}) == second);
    CHECK(*names.origin(second) == after);
  }

  TEST_CASE("an older or equal epoch resets nothing, and an unknown name has no blocks") {
    NameTable names;
    (void)names.number({.name = name_of(1), .kind = 0, .epoch = {5, 6}}, 1);
    const std::uint64_t version = names.version();

    CHECK_FALSE(names.reset(name_of(1), {5, 6}));
    CHECK_FALSE(names.reset(name_of(1), {4, 9}));
    CHECK_FALSE(names.reset(name_of(2), {9, 9}));
    CHECK(names.version() == version);
  }

  TEST_CASE("a newer epoch that is met at a write counts as a reset") {
    NameTable names;
    const std::uint16_t first =
        names.number({.name = name_of(1), .kind = 0, .epoch = {}}, 1).value();

    const auto second = names.number({.name = name_of(1), .kind = 0, .epoch = {1, 1}}, 1);

    REQUIRE(second);
    CHECK(*second != first);
    CHECK(names.origin(first) == nullptr);
  }

  TEST_CASE("a name with another kind gets no number") {
    NameTable names;
    (void)names.number({.name = name_of(1), .kind = 0, .epoch = {}}, 1);

    CHECK_FALSE(names.number({.name = name_of(1), .kind = 1, .epoch = {}}, 1));
  }

  TEST_CASE("the name that was unused for longest gives way at the limit") {
    NameTable names;
    for (std::uint32_t i = 0; i < kMostNames; ++i) {
      SpaceName name{};
      name[0] = static_cast<std::byte>(i);
      name[1] = std::byte{1};
      REQUIRE(names.number({.name = name, .kind = 0, .epoch = {}}, i == 3 ? 1 : 100 + i));
    }
    SpaceName oldest{};
    oldest[0] = std::byte{3};
    oldest[1] = std::byte{1};
    CHECK(names.find(oldest, {}));

    CHECK(names.number({.name = name_of(9), .kind = 0, .epoch = {}}, 1000));

    CHECK_FALSE(names.find(oldest, {}));
    CHECK(names.records().size() == kMostNames);
  }

  TEST_CASE("numbers end, blocks stay dead, and a restart begins again with the same epochs") {
    NameTable names;
    names.load(
        {.sequence = 3,
         .next_number = NameTable::kLastNumber,
         .records = {{.origin = {.name = name_of(1), .kind = 0, .epoch = {}}, .number = 7}}});
    CHECK(names.reset(name_of(1), {1, 1}));  // Takes the last number.
    CHECK(names.is_exhausted());
    CHECK(names.reset(name_of(1), {2, 2}));
    CHECK(names.origin(NameTable::kLastNumber) == nullptr);
    CHECK_FALSE(names.number({.name = name_of(1), .kind = 0, .epoch = {2, 2}}, 1));

    names.restart();

    CHECK(names.number({.name = name_of(1), .kind = 0, .epoch = {2, 2}}, 1) == 1);
  }
}

}  // namespace pegaflow::engine::ssd
