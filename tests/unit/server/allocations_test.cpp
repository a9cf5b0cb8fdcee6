// The descriptors of GPU memory that the server keeps for its workers.
#include "server/direct/allocations.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/descriptor_box.h"
#include "tests/support/open_descriptors.h"
#include "tests/support/patience.h"

namespace pegaflow::server {
namespace {

using testing::open_descriptors;

UniqueFd box_of(std::uint64_t count) {
  DescriptorBox box;
  for (std::uint64_t i = 0; i < count; ++i) {
    UniqueFd file(::memfd_create("allocation", MFD_CLOEXEC));
    REQUIRE(::write(file.get(), &i, sizeof i) == sizeof i);
    REQUIRE(box.add(std::move(file)));
  }
  return box.close().value();
}

/// The numbers in the files of a box.
std::vector<std::uint64_t> numbers_in(int box, std::size_t count) {
  std::vector<std::uint64_t> numbers;
  REQUIRE(DescriptorBox::look(box, count, [&](UniqueFd file) -> Result<void> {
    std::uint64_t number = ~std::uint64_t{0};
    CHECK(::pread(file.get(), &number, sizeof number, 0) == sizeof number);
    numbers.push_back(number);
    return {};
  }));
  return numbers;
}

/// Waits until the thread that closes has come as far.
bool ends_with(const AllocationCloser& closer, std::size_t reserved) {
  const auto end = std::chrono::steady_clock::now() + testing::kHang;
  while (closer.reserved() != reserved) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST_SUITE("the allocations of workers") {
  TEST_CASE("each reader gets all of them, in their order, and the server keeps one set") {
    const std::size_t before = open_descriptors();
    const auto closer = std::make_shared<AllocationCloser>(2'000);
    auto allocations = Allocations::take(closer, box_of(600).get(), 600).value();
    CHECK(open_descriptors() == before + 600);
    CHECK(closer->reserved() == 600);
    for (int reader = 0; reader < 3; ++reader) {
      const UniqueFd box = allocations->pack().value();
      CHECK(open_descriptors() == before + 601);
      const std::vector<std::uint64_t> numbers = numbers_in(box.get(), 600);
      for (std::uint64_t i = 0; i < numbers.size(); ++i) REQUIRE(numbers[i] == i);
    }
    allocations.reset();
    CHECK(ends_with(*closer, 0));
    CHECK(open_descriptors() == before);
  }

  TEST_CASE("more than the server has room for are refused with the fix, until others are gone") {
    const auto closer = std::make_shared<AllocationCloser>(500);
    auto first = Allocations::take(closer, box_of(300).get(), 300).value();
    const UniqueFd second = box_of(300);
    const std::size_t before = open_descriptors();
    const auto refused = Allocations::take(closer, second.get(), 300);
    CHECK(refused.error().code == Errc::kRefused);
    CHECK(refused.error().detail.find("300 allocations of GPU memory") == 0);
    CHECK(refused.error().detail.find("ulimit -n") != std::string::npos);
    CHECK(open_descriptors() == before);
    first.reset();
    REQUIRE(ends_with(*closer, 0));
    CHECK(Allocations::take(closer, second.get(), 300).has_value());
  }

  TEST_CASE("a box with another number of them leaves none open, and its room is free") {
    const auto closer = std::make_shared<AllocationCloser>(1'000);
    const UniqueFd box = box_of(300);
    const std::size_t before = open_descriptors();
    CHECK(Allocations::take(closer, box.get(), 299).error().code == Errc::kInvalidArgument);
    CHECK(Allocations::take(closer, box.get(), 301).error().code == Errc::kInvalidArgument);
    CHECK(Allocations::take(closer, -1, 1).error().code == Errc::kInvalidArgument);
    CHECK(ends_with(*closer, 0));
    CHECK(open_descriptors() == before);
  }

  TEST_CASE("they are closed also where the server ends first") {
    const std::size_t before = open_descriptors();
    {
      auto closer = std::make_shared<AllocationCloser>(1'000);
      const auto allocations = Allocations::take(closer, box_of(300).get(), 300).value();
      closer.reset();
    }
    CHECK(open_descriptors() == before);
  }
}

}  // namespace
}  // namespace pegaflow::server
