#include "index/placement/expected_blocks.h"

#include <numeric>

#include <doctest/doctest.h>

namespace pegaflow::index {
namespace {

TimePoint at(int seconds) { return TimePoint(std::chrono::seconds(seconds)); }

std::vector<std::uint64_t> chain(std::uint64_t first, std::size_t length) {
  std::vector<std::uint64_t> keys(length);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

std::vector<std::uint32_t> match(const ExpectedBlocks& expected,
                                 const std::vector<std::uint64_t>& keys, TimePoint now) {
  std::vector<std::uint32_t> blocks(4);
  expected.match(keys, now, blocks);
  return blocks;
}

TEST_SUITE("ExpectedBlocks") {
  TEST_CASE("a prompt is expected where it was placed") {
    auto expected = *ExpectedBlocks::create({.stride = 1});

    expected.placed(2, chain(0, 10), at(1));

    CHECK(match(expected, chain(0, 20), at(2)) == std::vector<std::uint32_t>{0, 0, 10, 0});
    CHECK(match(expected, chain(0, 4), at(2)) == std::vector<std::uint32_t>{0, 0, 4, 0});
    CHECK(match(expected, chain(100, 4), at(2)) == std::vector<std::uint32_t>{0, 0, 0, 0});
    CHECK(match(expected, {}, at(2)) == std::vector<std::uint32_t>{0, 0, 0, 0});
  }

  TEST_CASE("with a stride, the end of the placed prompt is found as well") {
    auto expected = *ExpectedBlocks::create({.stride = 8});

    expected.placed(1, chain(0, 21), at(1));

    CHECK(match(expected, chain(0, 40), at(1))[1] == 21);
    CHECK(match(expected, chain(0, 20), at(1))[1] == 16);
    CHECK(match(expected, chain(0, 5), at(1))[1] == 5);
  }

  TEST_CASE("a beginning that is shorter than a stride is found") {
    auto expected = *ExpectedBlocks::create({.stride = 8});

    expected.placed(1, chain(0, 100), at(1));

    for (std::size_t length = 1; length <= 16; ++length) {
      CHECK(match(expected, chain(0, length), at(1))[1] == length);
    }
    CHECK(match(expected, chain(0, 31), at(1))[1] == 24);
    CHECK(match(expected, chain(0, 99), at(1))[1] == 96);
    CHECK(match(expected, chain(0, 200), at(1))[1] == 100);
  }

  TEST_CASE("the two engines that were chosen last are remembered") {
    auto expected = *ExpectedBlocks::create({.stride = 1});
    const auto keys = chain(0, 3);

    for (const EngineId engine : {0U, 1U, 2U}) expected.placed(engine, keys, at(1));

    CHECK(match(expected, keys, at(1)) == std::vector<std::uint32_t>{0, 3, 3, 0});
  }

  TEST_CASE("entries end after twice their lifetime at most, and live at least once") {
    auto expected = *ExpectedBlocks::create({.stride = 1, .lifetime = std::chrono::seconds(10)});
    expected.placed(0, chain(0, 3), at(100));

    expected.placed(1, chain(50, 3), at(109));
    CHECK(match(expected, chain(0, 3), at(110))[0] == 3);

    expected.placed(1, chain(60, 3), at(115));
    CHECK(match(expected, chain(0, 3), at(116))[0] == 3);

    expected.placed(1, chain(70, 3), at(126));
    CHECK(match(expected, chain(0, 3), at(126))[0] == 0);
    CHECK(match(expected, chain(70, 3), at(1000))[1] == 0);
  }

  TEST_CASE("beyond its limit the older generation is dropped") {
    auto expected = *ExpectedBlocks::create({.max_blocks = 1024, .stride = 1});

    for (std::uint64_t i = 0; i < 30; ++i) expected.placed(0, chain(i * 1000, 100), at(1));

    CHECK(match(expected, chain(29000, 100), at(1))[0] == 100);
    CHECK(match(expected, chain(0, 100), at(1))[0] == 0);
  }

  TEST_CASE("an engine that is forgotten or evicts a block is not expected to hold it") {
    auto expected = *ExpectedBlocks::create({.stride = 1});
    expected.placed(0, chain(0, 5), at(1));
    expected.placed(1, chain(0, 5), at(1));

    const std::uint64_t last = 4;
    expected.erased(1, {&last, 1});
    CHECK(match(expected, chain(0, 5), at(1)) == std::vector<std::uint32_t>{5, 4, 0, 0});

    expected.forget(1);
    CHECK(match(expected, chain(0, 5), at(1)) == std::vector<std::uint32_t>{5, 0, 0, 0});
  }

  TEST_CASE("options out of range are rejected by name") {
    CHECK(ExpectedBlocks::create({.max_blocks = 10}).error().detail ==
          "expected blocks: max_blocks is 10, not 1024 to 67108864");
    CHECK(ExpectedBlocks::create({.stride = 0}).error().code == Errc::kInvalidArgument);
    CHECK(ExpectedBlocks::create({.lifetime = Duration::zero()}).error().code ==
          Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::index
