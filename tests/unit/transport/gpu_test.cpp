// A GPU as networks use it, in software.
#include "transport/cuda/gpu.h"

#include <algorithm>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"
#include "tests/support/software_cuda.h"

namespace pegaflow::cuda {
namespace {

using testing::SoftwareCuda;

TEST_SUITE("Gpu") {
  TEST_CASE("a GPU that this process does not see is refused") {
    const auto driver = std::make_shared<SoftwareCuda>(testing::seed());
    for (const int ordinal : {-1, 9}) {
      const auto none = Gpu::open(driver, ordinal);
      REQUIRE_FALSE(none);
      CHECK(none.error().code == Errc::kRefused);
      CHECK(none.error().detail.starts_with(fmt::format("there is no GPU {}", ordinal)));
    }
  }

  TEST_CASE("its context for a fabric keeps it alive") {
    const auto driver = std::make_shared<SoftwareCuda>(testing::seed());
    std::shared_ptr<Gpu> gpu = Gpu::open(driver, 0).value();
    const GpuContext context = Gpu::context_of(gpu);
    const std::weak_ptr<Gpu> seen = gpu;
    gpu.reset();
    CHECK_FALSE(seen.expired());
    CHECK(context.device == 0);
    CHECK(context.make_current());
    CHECK(Gpu::open(driver, 0).value()->pci_address() == "0000:10:00.0");
  }

  TEST_CASE("what a card has written is flushed where the GPU does not order it by itself") {
    const auto driver = std::make_shared<SoftwareCuda>(testing::seed());
    const auto gpu = Gpu::open(driver, 0).value();
    CHECK(gpu->needs_flush() == false);
    driver->need_flushes(true);
    CHECK(gpu->needs_flush() == true);
    CHECK(gpu->show_network_writes());
    CHECK(driver->flushes() == 1);
    driver->need_flushes(false);
    const auto refused = gpu->needs_flush();
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Errc::kRefused);
    CHECK(refused.error().detail == "GPU 0 neither orders the writes of cards nor flushes them");
    CHECK_FALSE(gpu->show_network_writes());
  }

  TEST_CASE("memory has the bytes that were written to a part of it, and is freed") {
    const auto driver = std::make_shared<SoftwareCuda>(testing::seed(), 1 << 20);
    {
      const auto gpu = Gpu::open(driver, 0).value();
      CHECK(GpuMemory::create(gpu, 2 << 20).error().code == Errc::kOutOfCapacity);
      const auto memory = GpuMemory::create(gpu, 4096).value();
      CHECK(memory->memory().kind == MemoryKind::kCuda);
      CHECK(memory->memory().bytes == 4096);
      const std::vector<std::byte> sent(100, std::byte{7});
      std::vector<std::byte> arrived(4096, std::byte{1});
      REQUIRE(memory->write(sent, 1000));
      REQUIRE(memory->read(arrived, 0));
      CHECK(std::ranges::count(arrived, std::byte{7}) == 100);
      CHECK(std::ranges::count(arrived, std::byte{0}) == 3996);
      CHECK(arrived[1000] == std::byte{7});
      REQUIRE(memory->clear());
      REQUIRE(memory->read(arrived, 0));
      CHECK(std::ranges::count(arrived, std::byte{0}) == 4096);
      driver->break_device(700);
      CHECK_FALSE(memory->read(arrived, 0));
    }
    CHECK(driver->live_objects() == 0);
  }
}

}  // namespace
}  // namespace pegaflow::cuda
