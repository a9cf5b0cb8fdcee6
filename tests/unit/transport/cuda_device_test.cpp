// Built twice: over the driver in software, which runs everywhere, and over the real one.
#include "transport/cuda/cuda_device.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "tests/support/engine_memory.h"
#include "tests/support/seed.h"
#include "tests/support/skip.h"
#include "tests/unit/transport/cuda_fixture.h"
#include "tests/unit/transport/layouts_conformance.h"

namespace pegaflow {
namespace {

using cuda::Path;
using testing::CudaFixture;
using testing::CudaShape;
using testing::PoolMemory;
using Direction = Device::Direction;

std::vector<std::byte> page_of(std::uint64_t seed, std::size_t bytes) {
  std::vector<std::byte> page(bytes);
  testing::fill_page(page.data(), page.size(), seed);
  return page;
}

std::vector<std::uint32_t> shuffled(std::size_t count, std::mt19937_64& random) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

/// Saves all blocks in batches of random sizes, overwrites them, and loads them back elsewhere.
void round_trip(std::mt19937_64& random, const CudaShape& shape, const CudaDevice::Options& options,
                bool checksums) {
  CAPTURE(shape.segments);
  CAPTURE(shape.segment_bytes);
  CAPTURE(shape.blocks);
  CudaFixture f(shape, options);
  const std::size_t blocks = shape.blocks;
  const std::vector<std::uint32_t> slots = shuffled(blocks, random);
  // Block b's bytes are loaded into block target[b].
  const std::vector<std::uint32_t> target = shuffled(blocks, random);
  for (std::uint32_t block = 0; block < blocks; ++block) f.memory.fill(block, block + 1000);

  std::size_t batches = 0;
  const auto move_all = [&](Direction direction) {
    for (std::uint32_t block = 0; block < blocks;) {
      Device::Batch batch{++batches, direction, Device::Event::kNow, {}};
      for (std::size_t i = 1 + random() % 40; i > 0 && block < blocks; --i, ++block) {
        const std::uint32_t at = direction == Direction::kSave ? block : target[block];
        batch.copies.push_back({at, slots[block] * f.slot_bytes, checksums && block % 3 != 0});
      }
      REQUIRE(f.device->submit(std::move(batch)));
    }
    return f.completions.wait_for(batches);
  };
  move_all(Direction::kSave);
  for (std::uint32_t block = 0; block < blocks; ++block) {
    const auto expected = page_of(block + 1000, f.page_bytes);
    CHECK(std::equal(expected.begin(), expected.end(), f.page(slots[block]).begin()));
    f.memory.fill(block, 7);
  }
  const auto done = move_all(Direction::kLoad);

  std::vector<std::uint64_t> seeds(blocks);
  for (std::uint32_t block = 0; block < blocks; ++block) seeds[target[block]] = block + 1000;
  CHECK(f.memory.wrong(seeds).empty());
  CHECK(f.memory.gaps_are_whole());
  std::vector<Device::Completion> by_ticket(batches + 1);
  for (const Device::Completion& completion : done) {
    CHECK_FALSE(completion.error);
    by_ticket[completion.ticket] = completion;
  }
  if (!checksums) return;
  if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels, which compute the checksums");
  // Saves first, then loads, each with the blocks in order.
  std::uint32_t block = 0;
  for (const Device::Completion& completion : by_ticket) {
    for (std::size_t i = 0; i < completion.copied; ++i) {
      const std::uint64_t right = PageChecksum::of(page_of(block + 1000, f.page_bytes));
      const bool taken = block % 3 != 0;
      if (completion.checksums.empty()) {
        CHECK_FALSE(taken);
      } else {
        CHECK(completion.checksums[i] == (taken ? right : kNoChecksum));
      }
      block = block + 1 == blocks ? 0 : block + 1;
    }
  }
}

/// A device for the cases of all devices with several layouts.
struct OverlaidFixture {
  explicit OverlaidFixture(const CudaDevice::Options& options)
      : driver(testing::driver_under_test()),
        engine(driver, 1, testing::LayoutsRig::kEngineBytes, 1, 0),
        pool(testing::LayoutsRig::kPoolBytes),
        device(CudaDevice::create(options, driver).value()) {}

  testing::LayoutsRig rig() {
    return {.device = *device,
            .engine = engine.layout().segments().front().base,
            .pool = pool.bytes(),
            .sink = completions.sink(),
            .wait_for = [this](std::size_t count) { return completions.wait_for(count); },
            .write = [this](std::span<const std::byte> bytes) { engine.write(0, bytes); },
            .read = [this] { return engine.read(0); }};
  }

  std::shared_ptr<cuda::Driver> driver;
  testing::DeviceMemory engine;
  PoolMemory pool;
  testing::CudaCompletions completions;
  std::unique_ptr<CudaDevice> device;
};

TEST_SUITE("CudaDevice") {
  TEST_CASE("a page holds a block's segments in order, on either path") {
    for (const Path path : {Path::kStaged, Path::kDirect}) {
      CudaDevice::Options options = testing::small_options();
      options.path = path;
      CudaFixture f({}, options);
      f.memory.fill(3, 77);

      REQUIRE(
          f.device->submit({1, Direction::kSave, Device::Event::kNow, {{3, 5 * f.slot_bytes}}}));

      const auto done = f.completions.wait_for(1);
      CHECK(done[0].ticket == 1);
      CHECK(done[0].copied == 1);
      CHECK_FALSE(done[0].error);
      const auto expected = page_of(77, f.page_bytes);
      CHECK(std::equal(expected.begin(), expected.end(), f.page(5).begin()));
    }
  }

  TEST_CASE("bytes come back over random layouts, orders, paths and batches") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 24; ++round) {
      const CudaShape shape{.segments = 1 + random() % 5,
                            .segment_bytes = 1 + random() % (round % 6 == 0 ? 200'000 : 3'000),
                            .blocks = 1 + random() % 150,
                            .gap_bytes = 1 + random() % 100};
      CudaDevice::Options options = testing::small_options();
      if (round % 3 != 0) options.path = round % 3 == 1 ? Path::kStaged : Path::kDirect;
      round_trip(random, shape, options, false);
    }
  }

  TEST_CASE("pages of overlaid layouts come back, and no byte beside them changes") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 24; ++round) {
      CudaDevice::Options options = testing::small_options();
      if (round % 3 != 0) options.path = round % 3 == 1 ? Path::kStaged : Path::kDirect;
      OverlaidFixture f(options);
      testing::LayoutsRig rig = f.rig();
      testing::check_overlaid_layouts(rig, random);
    }
  }

  TEST_CASE("a batch of an unknown layout, or beyond its own, is rejected by name") {
    OverlaidFixture f(testing::small_options());
    testing::LayoutsRig rig = f.rig();
    testing::check_bad_layouts(rig);
  }

  TEST_CASE("aligned segments of many sizes come back, pages larger than a slice too") {
    std::mt19937_64 random(testing::seed());
    for (const std::size_t segment_bytes : {16UL, 4096UL, 16384UL, 65536UL, 327'680UL}) {
      for (const std::size_t segments : {1UL, 4UL}) {
        const CudaShape shape{.segments = segments,
                              .segment_bytes = segment_bytes,
                              .blocks = 20,
                              .gap_bytes = random() % 2 == 0 ? 0UL : 256UL};
        CudaDevice::Options options = testing::small_options();
        options.path = Path::kStaged;
        round_trip(random, shape, options, false);
      }
    }
  }

  TEST_CASE("checksums are those of the page, in both directions, for the pages that request one") {
    std::mt19937_64 random(testing::seed());
    // Around the sizes at which the hash takes another branch: stripes of 64, blocks of 1024.
    for (const std::size_t page_bytes :
         {241UL, 256UL, 1023UL, 1024UL, 1025UL, 1088UL, 2048UL, 2049UL, 9'999UL, 65'536UL}) {
      for (const Path path : {Path::kStaged, Path::kDirect}) {
        CudaDevice::Options options = testing::small_options();
        options.path = path;
        round_trip(random, {.segments = 1, .segment_bytes = page_bytes, .blocks = 30}, options,
                   true);
      }
    }
  }

  TEST_CASE("a page larger than a slice gets no checksum") {
    CudaFixture f({.segments = 1, .segment_bytes = 80 << 10, .blocks = 2});
    f.memory.fill(0, 1);
    Device::Batch batch = f.batch(1, Direction::kSave, {0});
    batch.copies[0].checksum = true;

    REQUIRE(f.device->submit(batch));

    const auto done = f.completions.wait_for(1);
    CHECK(done[0].copied == 1);
    CHECK(done[0].checksums == std::vector<std::uint64_t>{kNoChecksum});
  }

  TEST_CASE("both directions at once leave every byte right") {
    std::mt19937_64 random(testing::seed());
    CudaFixture f({.segments = 2, .segment_bytes = 3'000, .blocks = 64});
    // Blocks 0 to 31 are saved over and over, 32 to 63 are loaded from slots of their own.
    for (std::uint32_t block = 0; block < 32; ++block) f.memory.fill(block, block + 1);
    for (std::uint32_t block = 32; block < 64; ++block) {
      const auto page = page_of(block + 1, f.page_bytes);
      std::copy(page.begin(), page.end(), f.page(block).begin());
    }
    for (std::uint64_t ticket = 1; ticket <= 200; ++ticket) {
      const bool save = ticket % 2 == 0;
      auto blocks = shuffled(32, random);
      if (!save) std::for_each(blocks.begin(), blocks.end(), [](auto& block) { block += 32; });
      REQUIRE(
          f.device->submit(f.batch(ticket, save ? Direction::kSave : Direction::kLoad, blocks)));
    }

    for (const auto& completion : f.completions.wait_for(200)) {
      CHECK_FALSE(completion.error);
      CHECK(completion.copied == 32);
    }
    std::vector<std::uint64_t> seeds(64);
    std::iota(seeds.begin(), seeds.end(), 1UL);
    CHECK(f.memory.wrong(seeds).empty());
    for (std::uint32_t block = 0; block < 32; ++block) {
      const auto expected = page_of(block + 1, f.page_bytes);
      CHECK(std::equal(expected.begin(), expected.end(), f.page(block).begin()));
    }
  }

  TEST_CASE(
      "after a cancel at any time, the counted pages are complete and no others are touched") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 40; ++round) {
      CudaDevice::Options options = testing::small_options();
      options.path = round % 2 == 0 ? Path::kStaged : Path::kDirect;
      CudaFixture f({.segments = 2, .segment_bytes = 16 << 10, .blocks = 64}, options);
      for (std::uint32_t block = 0; block < 64; ++block) f.memory.fill(block, block + 1);
      const auto order = shuffled(64, random);
      REQUIRE(f.device->submit(f.batch(1, Direction::kSave, order)));
      for (std::size_t spins = random() % 200'000; spins > 0; --spins)
        asm volatile("" ::: "memory");

      if (round % 4 < 2) {
        f.device->cancel(1);
      } else {
        f.device->detach();
      }

      const auto done = f.completions.wait_for(1);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < order.size(); ++i) {
        const auto page = f.page(order[i]);
        if (i < done[0].copied) {
          const auto expected = page_of(order[i] + 1, f.page_bytes);
          wrong += std::equal(expected.begin(), expected.end(), page.begin()) ? 0 : 1;
        } else {
          wrong += std::all_of(page.begin(), page.end(),
                               [](std::byte byte) { return byte == std::byte{0}; })
                       ? 0
                       : 1;
        }
      }
      CHECK(wrong == 0);
      CHECK(done[0].error.has_value() == (done[0].copied < order.size()));
      if (done[0].error) CHECK(done[0].error->code == Errc::kCancelled);
    }
  }

  TEST_CASE("every batch completes once, with concurrent submits, cancels and detaches") {
    CudaFixture f({.segments = 2, .segment_bytes = 512, .blocks = 3'000});
    std::vector<std::thread> users;
    std::mutex mutex;
    std::vector<std::uint64_t> accepted;
    std::mt19937_64 random(testing::seed());
    for (std::uint64_t user = 0; user < 3; ++user) {
      users.emplace_back([&, user, seed = random()] {
        std::mt19937_64 mine(seed);
        for (std::uint64_t i = 0; i < 200; ++i) {
          const std::uint64_t ticket = user * 1000 + i;
          std::vector<std::uint32_t> blocks(mine() % 5);
          std::iota(blocks.begin(), blocks.end(), static_cast<std::uint32_t>(user * 1000 + i * 5));
          if (f.device->submit(f.batch(ticket, Direction::kSave, blocks))) {
            const std::lock_guard lock(mutex);
            accepted.push_back(ticket);
          }
          if (mine() % 3 == 0) f.device->cancel(user * 1000 + mine() % (i + 1));
        }
      });
    }
    users.emplace_back([&] { f.device->detach(); });
    for (std::thread& user : users) user.join();
    f.device->detach();

    std::vector<std::uint64_t> seen;
    for (const auto& completion : f.completions.wait_for(accepted.size())) {
      seen.push_back(completion.ticket);
    }
    std::sort(seen.begin(), seen.end());
    std::sort(accepted.begin(), accepted.end());
    CHECK(seen == accepted);
  }

  TEST_CASE("an empty batch completes, and another pool can be attached") {
    CudaFixture f;
    REQUIRE(f.device->submit(f.batch(1, Direction::kLoad, {})));
    CHECK(f.completions.wait_for(1)[0].copied == 0);
    f.device->detach();
    CHECK(f.device->submit(f.batch(2, Direction::kSave, {0})).error().code == Errc::kGone);

    const PoolMemory other(f.pool.bytes().size());
    REQUIRE(f.device->attach(f.memory.layout(), other.bytes(), f.completions.sink()));
    f.memory.fill(0, 9);
    REQUIRE(f.device->submit(f.batch(3, Direction::kSave, {0})));

    CHECK_FALSE(f.completions.wait_for(2)[1].error);
    const auto expected = page_of(9, f.page_bytes);
    CHECK(std::equal(expected.begin(), expected.end(), other.bytes().begin()));
  }

  TEST_CASE("large segments go directly, small ones are staged") {
    CudaDevice::Options options = testing::small_options();
    CudaFixture large({.segments = 1, .segment_bytes = 2 << 20, .blocks = 4}, options);
    CudaFixture small({.segments = 4, .segment_bytes = 64 << 10, .blocks = 4}, options);
    CHECK(large.device->info().path == Path::kDirect);
    CHECK(small.device->info().path == (testing::has_kernels() ? Path::kStaged : Path::kDirect));
  }

  TEST_CASE("invalid calls are rejected") {
    CudaDevice::Options options = testing::small_options();
    CudaFixture f({}, options);
    const auto code = [](const auto& result) { return result.error().code; };
    CHECK(code(f.device->attach(f.memory.layout(), f.pool.bytes(), f.completions.sink())) ==
          Errc::kInvalidArgument);
    CHECK(code(f.device->submit({1, Direction::kSave, Device::Event::kNow, {{16, 0}}})) ==
          Errc::kInvalidArgument);
    CHECK(code(f.device->submit(
              {1, Direction::kSave, Device::Event::kNow, {{0, f.pool.bytes().size() - 1}}})) ==
          Errc::kInvalidArgument);
    CHECK(code(f.device->submit(
              {1, Direction::kSave, Device::Event::kNow, {{0, ~std::uint64_t{0}}}})) ==
          Errc::kInvalidArgument);

    const auto create = [&](auto change) {
      CudaDevice::Options wrong = testing::small_options();
      change(wrong);
      return CudaDevice::create(wrong, f.driver).error().code;
    };
    CHECK(create([](auto& o) { o.ordinal = 99; }) == Errc::kRefused);
    CHECK(create([](auto& o) { o.ordinal = -1; }) == Errc::kRefused);
    CHECK(create([](auto& o) { o.slice_bytes = 1; }) == Errc::kInvalidArgument);
    CHECK(create([](auto& o) { o.staging_bytes = o.slice_bytes - 1; }) == Errc::kInvalidArgument);
    CHECK(create([](auto& o) { o.register_bytes = 3 << 20; }) == Errc::kInvalidArgument);
    CHECK(create([](auto& o) { o.register_threads = 0; }) == Errc::kInvalidArgument);
    CHECK(create([](auto& o) { o.max_batches = 0; }) == Errc::kInvalidArgument);
    CHECK(create([](auto& o) { o.max_events = 0; }) == Errc::kInvalidArgument);
    CHECK(CudaDevice::create({}, nullptr).error().code == Errc::kInvalidArgument);

    auto fresh = CudaDevice::create(options, f.driver).value();
    CHECK(code(fresh->submit({})) == Errc::kGone);
    CHECK(code(fresh->attach(f.memory.layout(), {}, f.completions.sink())) ==
          Errc::kInvalidArgument);
    CHECK(code(fresh->attach(f.memory.layout(), f.pool.bytes(), nullptr)) ==
          Errc::kInvalidArgument);
  }

  TEST_CASE("a child of fork() has no copy thread, and leaves the parent's alone") {
    CudaFixture f;
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      const bool gone =
          f.device->submit(f.batch(1, Direction::kSave, {0})).error().code == Errc::kGone &&
          f.device->record_event(Device::Queue::kDefault).error().code == Errc::kGone;
      f.device->detach();
      f.device->cancel(1);
      f.device.reset();
      ::_exit(gone ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    REQUIRE(f.device->submit(f.batch(1, Direction::kSave, {0})));
    CHECK_FALSE(f.completions.wait_for(1)[0].error);
  }
}

}  // namespace
}  // namespace pegaflow
