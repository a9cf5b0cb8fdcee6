#include "base/page_layout.h"

#include <array>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

std::array<std::byte, 64> memory;

TEST_SUITE("PageLayout") {
  TEST_CASE("a page is the sum of its segments, in their order") {
    const auto layout =
        PageLayout::create({{memory.data(), 16, 16}, {memory.data() + 32, 16, 8}}, 2);
    REQUIRE(layout);
    CHECK(layout->page_bytes() == 24);
    CHECK(layout->segments()[1].size_bytes == 8);
    CHECK(slot_bytes_for(24) == 4096);
    CHECK(slot_bytes_for(4096) == 4096);
    CHECK(slot_bytes_for(4097) == 8192);
  }

  TEST_CASE("an impossible layout is rejected with its numbers") {
    CHECK(PageLayout::create({}, 4).error().code == Errc::kInvalidArgument);
    CHECK(PageLayout::create({{memory.data(), 16, 16}}, 0).error().code == Errc::kInvalidArgument);
    CHECK(PageLayout::create({{nullptr, 16, 16}}, 2).error().code == Errc::kInvalidArgument);
    CHECK(PageLayout::create({{memory.data(), 16, 0}}, 2).error().code == Errc::kInvalidArgument);
    CHECK(PageLayout::create({{memory.data(), 8, 16}}, 2).error().detail.find("overlap") !=
          std::string::npos);
    const std::uint64_t much = kMaxPageBytes / 2 + 1;
    CHECK(PageLayout::create({{memory.data(), much, much}, {memory.data(), much, much}}, 1)
              .error()
              .detail.find("1 GiB") != std::string::npos);
  }
}

}  // namespace
}  // namespace pegaflow
