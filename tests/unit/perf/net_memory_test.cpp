#include "perf/net/net_memory.h"

#include <algorithm>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"
#include "tests/support/software_cuda.h"

namespace pegaflow::perf {
namespace {

constexpr std::size_t kBytes = (std::size_t{16} << 20) + 12345;  // More than one part.

TEST_SUITE("memory of pegaflow-perf net") {
  TEST_CASE("its kind is host, cuda or cuda:N") {
    CHECK(parse_memory("host").value() == std::nullopt);
    CHECK(parse_memory("cuda").value() == 0);
    CHECK(parse_memory("cuda:3").value() == 3);
    for (const char* const text :
         {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:999"}) {
      const auto refused = parse_memory(text);
      REQUIRE_FALSE(refused);
      CHECK(refused.error().code == Errc::kInvalidArgument);
      CHECK(refused.error().detail == fmt::format("'{}' is not host, cuda or cuda:N", text));
    }
  }

  TEST_CASE("it has the bytes that were filled in, and a wrong byte is named, on either side") {
    const auto driver = std::make_shared<testing::SoftwareCuda>(testing::seed());
    {
      const auto gpu = cuda::Gpu::open(driver, 0).value();
      for (const auto& side : {std::shared_ptr<cuda::Gpu>(), gpu}) {
        const auto memory = NetMemory::create(side, kBytes).value();
        const Memory place = memory->memory();
        CHECK(place.bytes == kBytes);
        CHECK((place.kind == MemoryKind::kCuda) == (side != nullptr));
        CHECK(memory->host_bytes().empty() == (side != nullptr));
        CHECK(memory->compare(7, kBytes).error().code == Errc::kCorrupt);

        REQUIRE(memory->fill(7));
        CHECK(memory->compare(7, kBytes));
        CHECK(memory->compare(7, 5));
        CHECK(memory->compare(8, kBytes).error().code == Errc::kCorrupt);
        // In software, a GPU's memory is the host's.
        place.base[kBytes - 1] ^= std::byte{1};
        CHECK(memory->compare(7, kBytes - 1));
        CHECK(memory->compare(7, kBytes).error().detail ==
              fmt::format("byte {} of the memory differs from the holder's", kBytes - 1));
        REQUIRE(memory->clear());
        CHECK(std::all_of(place.base, place.base + kBytes,
                          [](std::byte byte) { return byte == std::byte{}; }));
      }
      CHECK(gpu->make_current());
    }
    CHECK(driver->live_objects() == 0);
  }

  TEST_CASE("a GPU that is not there, and one without memory, are refused") {
    const auto driver = std::make_shared<testing::SoftwareCuda>(testing::seed(), 1 << 20);
    const auto none = cuda::Gpu::open(driver, 9);
    REQUIRE_FALSE(none);
    CHECK(none.error().code == Errc::kRefused);
    CHECK(none.error().detail.starts_with("there is no GPU 9"));
    const auto gpu = cuda::Gpu::open(driver, 0).value();
    CHECK(NetMemory::create(gpu, 2 << 20).error().code == Errc::kOutOfCapacity);
    CHECK(driver->live_objects() == 0);
  }
}

}  // namespace
}  // namespace pegaflow::perf
