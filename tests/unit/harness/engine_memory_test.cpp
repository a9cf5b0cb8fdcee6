#include "harness/engine_memory.h"

#include <cstring>

#include <doctest/doctest.h>

#include "harness/pattern.h"
#include "transport/device.h"
#include "transport/host/page_copy.h"

namespace pegaflow::harness {
namespace {

EngineMemory two_segments(std::size_t blocks) {
  return EngineMemory::create({.segments = 2, .segment_bytes = 4096, .blocks = blocks}).value();
}

TEST_SUITE("engine_memory") {
  TEST_CASE("the pattern differs between blocks, segments and salts") {
    EngineMemory memory = two_segments(4);
    memory.fill_all(1);
    CHECK(memory.holds(2, pattern_seed(1, 2)));
    CHECK_FALSE(memory.holds(2, pattern_seed(1, 3)));
    CHECK_FALSE(memory.holds(2, pattern_seed(2, 2)));
    memory.clear();
    CHECK_FALSE(memory.holds(2, pattern_seed(1, 2)));
  }

  TEST_CASE("a page is checked byte by byte") {
    EngineMemory memory = two_segments(2);
    memory.fill_all(7);
    std::vector<std::byte> page(8192);
    copy_page(memory.layout(), Device::Direction::kSave, 1, page.data());
    CHECK(is_pattern(page, pattern_seed(7, 1)));
    CHECK_FALSE(is_pattern(page, pattern_seed(7, 0)));
    page[8191] ^= std::byte{1};
    CHECK_FALSE(is_pattern(page, pattern_seed(7, 1)));
  }

  TEST_CASE("segments in the wrong order are detected") {
    EngineMemory memory = two_segments(1);
    memory.fill_all(7);
    std::vector<std::byte> page(8192);
    copy_page(memory.layout(), Device::Direction::kSave, 0, page.data());
    std::vector<std::byte> swapped(page.begin() + 4096, page.end());
    swapped.insert(swapped.end(), page.begin(), page.begin() + 4096);
    CHECK_FALSE(is_pattern(swapped, pattern_seed(7, 0)));
  }

  TEST_CASE("a byte between two blocks is no block's, and its change is detected") {
    EngineMemory memory =
        EngineMemory::create({.segments = 2, .segment_bytes = 4096, .blocks = 2, .gap_bytes = 64})
            .value();
    memory.fill_all(3);
    CHECK(memory.holds(1, pattern_seed(3, 1)));
    CHECK(memory.gaps_are_whole());

    memory.layout().segments()[1].base[4096 + 63] ^= std::byte{1};

    CHECK(memory.holds(0, pattern_seed(3, 0)));
    CHECK(memory.holds(1, pattern_seed(3, 1)));
    CHECK_FALSE(memory.gaps_are_whole());
  }

  TEST_CASE("pages without a segment are rejected") {
    CHECK(EngineMemory::create({.segments = 0, .segment_bytes = 4096, .blocks = 1}).error().code ==
          Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::harness
