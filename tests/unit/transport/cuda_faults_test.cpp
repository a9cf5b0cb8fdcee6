// Faults that only a driver in software can produce on request.
#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "base/clock.h"
#include "tests/support/engine_memory.h"
#include "tests/support/patience.h"
#include "tests/support/seed.h"
#include "tests/support/skip.h"
#include "tests/support/software_cuda.h"
#include "tests/unit/transport/cuda_fixture.h"

namespace pegaflow {

std::shared_ptr<cuda::Driver> testing::driver_under_test() {
  return std::make_shared<SoftwareCuda>(testing::seed());
}

namespace {

using cuda::Path;
using testing::CudaFixture;
using testing::CudaShape;
using testing::PoolMemory;
using testing::SoftwareCuda;
using Direction = Device::Direction;

std::vector<std::uint32_t> first(std::uint32_t count) {
  std::vector<std::uint32_t> blocks(count);
  std::iota(blocks.begin(), blocks.end(), 0U);
  return blocks;
}

struct SoftwareFixture {
  explicit SoftwareFixture(const CudaShape& shape = {},
                           const CudaDevice::Options& options = testing::small_options())
      : software(std::make_shared<SoftwareCuda>(testing::seed() + next_seed++)),
        f(shape, options, software) {}
  inline static std::uint64_t next_seed = 0;
  std::shared_ptr<SoftwareCuda> software;
  CudaFixture f;
};

bool is_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte == std::byte{0}; });
}

TEST_SUITE("CudaDevice, with faults") {
  TEST_CASE("a save waits for the engine's work, and a load does not wait for the save") {
    // Pages with a checksum are staged on either path, in one batch with others that are not.
    for (const auto& [path, checksums] : {std::pair{Path::kStaged, false},
                                          {Path::kStaged, true},
                                          {Path::kDirect, false},
                                          {Path::kDirect, true}}) {
      CudaDevice::Options options = testing::small_options();
      options.path = path;
      SoftwareFixture s({.segments = 2, .segment_bytes = 16 << 10, .blocks = 64}, options);
      CudaFixture& f = s.f;
      cuda::Stream compute = nullptr;
      REQUIRE(s.software->create_stream(0, compute) == cuda::kSuccess);
      s.software->block(compute, true);
      Device::Batch save = f.batch(1, Direction::kSave, first(60));
      for (std::size_t i = 3; i < 60; i += 4) save.copies[i].checksum = checksums;
      const Device::Queue queue{reinterpret_cast<std::uintptr_t>(compute)};
      save.after = f.device->record_event(queue).value();
      REQUIRE(f.device->submit(save));
      REQUIRE(f.device->submit(f.batch(2, Direction::kLoad, {61})));

      const auto early = f.completions.wait_for(1);
      s.software->settle();
      CHECK(early.size() == 1);
      CHECK(early[0].ticket == 2);
      CHECK(is_zero(f.pool.bytes().first(60 * f.slot_bytes)));
      for (const std::uint32_t block : first(60))
        f.memory.fill(block, block + 1);  // The engine's work.
      s.software->block(compute, false);

      const auto done = f.completions.wait_for(2);
      CHECK(done[1].copied == 60);
      for (const std::uint32_t block : first(60)) {
        std::vector<std::byte> expected(f.page_bytes);
        testing::fill_page(expected.data(), expected.size(), block + 1);
        CHECK(std::equal(expected.begin(), expected.end(), f.page(block).begin()));
      }
      s.software->destroy_stream(compute);
    }
  }

  TEST_CASE(
      "work that an engine queues behind an early completion finds the load's blocks complete") {
    // Each seed runs the streams in another order.
    for (int round = 0; round < 12; ++round) {
      const Path path = round % 4 == 3 ? Path::kDirect : Path::kStaged;
      CudaDevice::Options options = testing::small_options();
      options.path = path;
      // Eight times the staging: slices wait on the device for what earlier ones still use.
      options.ahead_bytes = 2 << 20;
      SoftwareFixture s({.segments = 2, .segment_bytes = 16 << 10, .blocks = 64}, options);
      CudaFixture& f = s.f;
      std::vector<std::uint64_t> seeds(64);
      std::iota(seeds.begin(), seeds.end(), 1UL);
      for (const std::uint32_t block : first(64)) f.memory.fill(block, seeds[block]);
      REQUIRE(f.device->submit(f.batch(1, Direction::kSave, first(64))));
      REQUIRE_FALSE(f.completions.wait_for(1)[0].error);
      for (const std::uint32_t block : first(64)) f.memory.fill(block, 1000);
      cuda::Stream compute = nullptr;
      REQUIRE(s.software->create_stream(0, compute) == cuda::kSuccess);
      const Device::Queue queue{reinterpret_cast<std::uintptr_t>(compute)};
      constexpr Duration kSoon = std::chrono::hours(1);

      s.software->hold();
      REQUIRE(f.device->submit(f.batch(2, Direction::kLoad, first(60))));
      const TimePoint limit = SteadyClock().now() + testing::kHang;
      while (!f.device->complete_early(2, queue, kSoon).value() && SteadyClock().now() < limit) {
        std::this_thread::yield();
      }
      CHECK_FALSE(f.device->complete_early(2, queue, -kSoon).value());  // Expected later than that.
      CHECK(f.completions.count() == 1);
      // The engine's work: it reads all blocks of one segment.
      const PageLayout layout = f.memory.layout();
      const Segment& segment = layout.segments()[1];
      const std::uint64_t bytes = segment.block_stride_bytes * 63 + segment.size_bytes;
      const PoolMemory seen(bytes);
      REQUIRE(s.software->register_host(seen.bytes().data(), bytes) == cuda::kSuccess);
      const cuda::Transfer read{seen.bytes().data(), reinterpret_cast<std::uintptr_t>(segment.base),
                                bytes};
      REQUIRE(s.software->copy(cuda::Direction::kToHost, &read, 1, compute) == cuda::kSuccess);
      s.software->resume();
      REQUIRE(s.software->synchronize(compute) == cuda::kSuccess);

      for (const std::uint32_t block : first(60)) {
        const auto expected = f.page(block).subspan(segment.size_bytes, segment.size_bytes);
        CHECK(std::equal(expected.begin(), expected.end(),
                         seen.bytes().begin() +
                             static_cast<std::ptrdiff_t>(block * segment.block_stride_bytes)));
      }
      const auto done = f.completions.wait_for(2);
      CHECK(done[1].ticket == 2);
      CHECK_FALSE(done[1].error);
      CHECK_FALSE(f.device->complete_early(2, queue, kSoon).value());  // The load is over.
      s.software->unregister_host(seen.bytes().data());
      s.software->destroy_stream(compute);
    }
  }

  TEST_CASE("no early completion for a save, an unknown batch, or one with checksums") {
    SoftwareFixture s({.segments = 2, .segment_bytes = 16 << 10, .blocks = 64});
    CudaFixture& f = s.f;
    s.software->hold();
    Device::Batch compared = f.batch(1, Direction::kLoad, first(4));
    for (Device::Copy& copy : compared.copies) copy.checksum = true;
    REQUIRE(f.device->submit(compared));
    REQUIRE(f.device->submit(f.batch(2, Direction::kSave, {8, 9})));
    // Queued behind both, so they are queued when this is.
    REQUIRE(f.device->submit(f.batch(3, Direction::kLoad, {10})));
    const TimePoint limit = SteadyClock().now() + testing::kHang;
    constexpr Duration kSoon = std::chrono::hours(1);
    const auto follows = [&](std::uint64_t ticket) {
      return f.device->complete_early(ticket, Device::Queue::kDefault, kSoon).value();
    };
    while (!follows(3) && SteadyClock().now() < limit) std::this_thread::yield();
    CHECK_FALSE(follows(1));
    CHECK_FALSE(follows(2));
    CHECK_FALSE(follows(4));
    s.software->resume();
    CHECK(f.completions.wait_for(3).size() == 3);
  }

  TEST_CASE("nothing is reported before its copies have ended, cancelled or not") {
    for (const bool detach : {false, true}) {
      SoftwareFixture s({.segments = 2, .segment_bytes = 16 << 10, .blocks = 64});
      CudaFixture& f = s.f;
      s.software->hold();
      const std::size_t before = s.software->copies();
      REQUIRE(f.device->submit(f.batch(1, Direction::kSave, first(64))));
      // Until some of it is queued on the device's streams.
      while (s.software->copies() == before) std::this_thread::yield();
      std::thread detaching;
      if (detach) {
        detaching = std::thread([&] { f.device->detach(); });
        // A block out of range is reported only while the device is attached.
        while (f.device->submit(f.batch(2, Direction::kSave, {64})).error().code != Errc::kGone) {
          std::this_thread::yield();
        }
      } else {
        f.device->cancel(1);
      }
      s.software->settle();
      CHECK(f.completions.count() == 0);

      s.software->resume();

      const auto done = f.completions.wait_for(1);
      if (detaching.joinable()) detaching.join();
      CHECK(done[0].copied < 64);
      REQUIRE(done[0].error);
      CHECK(done[0].error->code == Errc::kCancelled);
      for (std::uint32_t block = 0; block < 64; ++block) {
        CHECK(is_zero(f.page(block)) == (block >= done[0].copied));
      }
    }
  }

  TEST_CASE("an error on the device retires it, and every batch reports it") {
    SoftwareFixture s({.segments = 2, .segment_bytes = 16 << 10, .blocks = 64});
    CudaFixture& f = s.f;
    s.software->hold();
    REQUIRE(f.device->submit(f.batch(1, Direction::kSave, first(64))));
    REQUIRE(f.device->submit(f.batch(2, Direction::kLoad, first(64))));
    REQUIRE(f.device->submit(f.batch(3, Direction::kSave, first(8))));
    s.software->allow(4);
    s.software->settle();

    s.software->break_device(700);

    for (const auto& completion : f.completions.wait_for(3)) {
      REQUIRE(completion.error);
      CHECK(completion.error->code == Errc::kInternal);
      CHECK(completion.error->detail.find("software error 700") != std::string::npos);
    }
    CHECK(f.device->submit(f.batch(4, Direction::kSave, {0})).error().code == Errc::kInternal);
    CHECK(f.device->record_event(Device::Queue::kDefault).error().code == Errc::kInternal);
    f.device->cancel(1);
    f.device->detach();  // Returns, although CUDA rejects the release of the pool.
    CHECK(f.device->attach(f.memory.layout(), f.pool.bytes(), f.completions.sink()).error().code ==
          Errc::kInternal);
  }

  TEST_CASE("an event that was reused fails its batch and no other") {
    CudaDevice::Options options = testing::small_options();
    options.max_events = 4;
    SoftwareFixture s({}, options);
    CudaFixture& f = s.f;
    const Device::Event old = f.device->record_event(Device::Queue::kDefault).value();
    Device::Event fresh{};
    for (int i = 0; i < 4; ++i) fresh = f.device->record_event(Device::Queue::kDefault).value();
    Device::Batch stale = f.batch(1, Direction::kSave, {0});
    stale.after = old;
    Device::Batch good = f.batch(2, Direction::kSave, {1});
    good.after = fresh;
    REQUIRE(f.device->submit(stale));
    REQUIRE(f.device->submit(good));

    auto done = f.completions.wait_for(2);
    if (done[0].ticket == 2) std::swap(done[0], done[1]);
    REQUIRE(done[0].error);
    CHECK(done[0].error->code == Errc::kGone);
    CHECK(done[0].copied == 0);
    CHECK_FALSE(done[1].error);
  }

  TEST_CASE("at the limit, further batches are rejected until one has ended") {
    SoftwareFixture s({}, testing::limited_options(2));
    CudaFixture& f = s.f;
    s.software->hold();
    REQUIRE(f.device->submit(f.batch(1, Direction::kSave, {0})));
    REQUIRE(f.device->submit(f.batch(2, Direction::kSave, {1})));
    CHECK(f.device->submit(f.batch(3, Direction::kSave, {2})).error().code == Errc::kBusy);
    REQUIRE(f.device->submit(f.batch(4, Direction::kLoad, {2})));

    s.software->resume();

    f.completions.wait_for(3);
    CHECK(f.device->submit(f.batch(5, Direction::kSave, {2})).has_value());
    f.completions.wait_for(4);
  }

  TEST_CASE("at the limit, the sink of a batch may submit the next one") {
    SoftwareFixture s({}, testing::limited_options(1));
    CudaFixture& f = s.f;
    f.device->detach();
    std::optional<Result<void>> next;
    const auto collect = f.completions.sink();
    REQUIRE(f.device->attach(f.memory.layout(), f.pool.bytes(), [&](Device::Completion&& done) {
      if (!next) next = f.device->submit(f.batch(2, Direction::kSave, {1}));
      collect(std::move(done));
    }));

    REQUIRE(f.device->submit(f.batch(1, Direction::kSave, {0})));

    f.completions.wait_for(1);
    REQUIRE(next->has_value());
    CHECK(f.completions.wait_for(2).back().copied == 1);
    f.device->detach();
  }

  TEST_CASE("a pool that cannot be page-locked in all its ranges is page-locked in none") {
    auto software = std::make_shared<SoftwareCuda>(testing::seed());
    const testing::DeviceMemory memory(software, 1, 64 << 10, 16);
    const testing::PoolMemory pool((64 << 10) * 16);
    auto device = CudaDevice::create(testing::small_options(), software).value();
    software->fail_registration(5);
    const auto sink = [](Device::Completion&&) {};

    const auto refused = device->attach(memory.layout(), pool.bytes(), sink);

    CHECK(refused.error().code == Errc::kOutOfCapacity);
    CHECK(software->registered_ranges() == 0);
    REQUIRE(device->attach(memory.layout(), pool.bytes(), sink));
    CHECK(software->registered_ranges() == 16);
    device->detach();
    CHECK(software->registered_ranges() == 0);
  }

  TEST_CASE("without memory for the second of two layouts, nothing of the first is kept") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    auto software = std::make_shared<SoftwareCuda>(testing::seed());
    const testing::DeviceMemory small(software, 1, 4 << 10, 4);
    const testing::DeviceMemory large(software, 1, 1 << 20, 4);  // 32 pieces.
    const testing::PoolMemory pool(slot_bytes_for((1 << 20) + (4 << 10)) * 4);
    CudaDevice::Options options = testing::small_options();
    options.path = Path::kDirect;
    auto device = CudaDevice::create(options, software).value();
    const std::vector<PageLayout> layouts{small.layout(), large.layout()};
    const std::size_t before = software->live_objects();
    software->refuse_allocations_from(8 * sizeof(cuda::Piece));

    const auto refused = device->attach(layouts, pool.bytes(), [](Device::Completion&&) {});

    CHECK(refused.error().code == Errc::kOutOfCapacity);
    CHECK(software->live_objects() == before);
    software->refuse_allocations_from(~std::uint64_t{0});
    CHECK(device->attach(layouts, pool.bytes(), [](Device::Completion&&) {}));
    device->detach();
    CHECK(software->live_objects() == before);
  }

  TEST_CASE("a GPU without memory for staging copies directly, one with less takes less") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    const auto path_with = [](std::uint64_t refused_from) {
      auto software = std::make_shared<SoftwareCuda>(testing::seed());
      const testing::DeviceMemory memory(software, 2, 4 << 10, 4);
      const testing::PoolMemory pool(slot_bytes_for(8 << 10) * 4);
      auto device = CudaDevice::create({}, software).value();
      software->refuse_allocations_from(refused_from);
      REQUIRE(device->attach(memory.layout(), pool.bytes(), [](Device::Completion&&) {}));
      return *device->info().path;
    };
    CHECK(path_with(64 << 20) == Path::kStaged);
    CHECK(path_with(16 << 20) == Path::kDirect);
  }

  TEST_CASE("all CUDA objects are released") {
    auto software = std::make_shared<SoftwareCuda>(testing::seed());
    {
      SUBCASE("after copies") {
        CudaFixture f({.segments = 2, .segment_bytes = 3'000, .blocks = 64},
                      testing::small_options(), software);
        REQUIRE(f.device->record_event(Device::Queue::kDefault));
        REQUIRE(f.device->submit(f.batch(1, Direction::kSave, first(64))));
        f.completions.wait_for(1);
      }
      SUBCASE("never attached") {
        CHECK(CudaDevice::create(testing::small_options(), software).has_value());
      }
    }
    CHECK(software->live_objects() == 0);
  }

  TEST_CASE("a GPU without memory for a copy stream is rejected") {
    auto software = std::make_shared<SoftwareCuda>(testing::seed());
    software->refuse_allocations_from(1);
    CHECK(CudaDevice::create({}, software).error().code == Errc::kOutOfCapacity);
    CHECK(software->live_objects() == 0);
  }
}

TEST_SUITE("cuda::Driver") {
  TEST_CASE("a machine without a driver reports so") {
    const auto driver = cuda::Driver::load();
    if (driver) PEGA_SKIP("this machine has a CUDA driver");
    CHECK(driver.error().code == Errc::kRefused);
    CHECK(driver.error().detail.find("CUDA driver") != std::string::npos);
  }
}

}  // namespace
}  // namespace pegaflow
