#include "harness/engine_memory.h"

#include <cstring>

#include <doctest/doctest.h>

#include "transport/device.h"
#include "transport/host/page_copy.h"

namespace pegaflow::harness {
namespace {

TEST_SUITE("engine_memory") {
  TEST_CASE("the pattern differs between blocks, segments and salts") {
    EngineMemory memory = EngineMemory::create(8192, 4096, 4).value();
    memory.write_pattern(1);
    CHECK(memory.has_pattern(2, 2, 1));
    CHECK_FALSE(memory.has_pattern(2, 3, 1));
    CHECK_FALSE(memory.has_pattern(2, 2, 2));
    memory.clear();
    CHECK_FALSE(memory.has_pattern(2, 2, 1));
  }

  TEST_CASE("a page is checked byte by byte") {
    EngineMemory memory = EngineMemory::create(8192, 4096, 2).value();
    memory.write_pattern(7);
    std::vector<std::byte> page(8192);
    copy_page(memory.layout(), Device::Direction::kSave, 1, page.data());
    CHECK(page_has_pattern(memory.layout(), page, 1, 7));
    CHECK_FALSE(page_has_pattern(memory.layout(), page, 0, 7));
    page[8191] ^= std::byte{1};
    CHECK_FALSE(page_has_pattern(memory.layout(), page, 1, 7));
  }

  TEST_CASE("segments in the wrong order are detected") {
    EngineMemory memory = EngineMemory::create(8192, 4096, 1).value();
    memory.write_pattern(7);
    std::vector<std::byte> page(8192);
    copy_page(memory.layout(), Device::Direction::kSave, 0, page.data());
    std::vector<std::byte> swapped(page.begin() + 4096, page.end());
    swapped.insert(swapped.end(), page.begin(), page.begin() + 4096);
    CHECK_FALSE(page_has_pattern(memory.layout(), swapped, 0, 7));
  }

  TEST_CASE("pages without a segment are rejected") {
    CHECK(EngineMemory::create(0, 4096, 1).error().code == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::harness
