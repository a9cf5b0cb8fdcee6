#include "transport/host/host_device.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "tests/support/engine_memory.h"
#include "tests/support/seed.h"
#include "tests/unit/transport/completions.h"
#include "tests/unit/transport/layouts_conformance.h"

namespace pegaflow {
namespace {

using testing::Completions;
using testing::engine_memory;
using testing::EngineMemory;
using Direction = Device::Direction;

struct Fixture {
  explicit Fixture(int threads = 1, std::size_t blocks = 16, std::size_t segment_bytes = 512,
                   std::size_t max_batches = 64)
      : memory(engine_memory(3, segment_bytes, blocks)),
        page_bytes(memory.layout().page_bytes()),
        pool(page_bytes * blocks),
        device(HostDevice::create({.threads = threads, .max_batches = max_batches}).value()) {
    REQUIRE(device->attach(memory.layout(), pool, completions.sink()));
  }

  Device::Batch batch(std::uint64_t ticket, Direction direction,
                      const std::vector<std::uint32_t>& blocks) const {
    Device::Batch batch{ticket, direction, Device::Event::kNow, {}};
    for (const std::uint32_t block : blocks) batch.copies.push_back({block, block * page_bytes});
    return batch;
  }

  EngineMemory memory;
  std::uint64_t page_bytes;
  std::vector<std::byte> pool;
  Completions completions;
  std::unique_ptr<HostDevice> device;
};

/// A device for the cases of all devices with several layouts.
struct OverlaidFixture {
  explicit OverlaidFixture(int threads)
      : engine(testing::LayoutsRig::kEngineBytes),
        pool(testing::LayoutsRig::kPoolBytes),
        device(HostDevice::create({.threads = threads}).value()) {}

  testing::LayoutsRig rig() {
    return {
        .device = *device,
        .engine = engine.data(),
        .pool = pool,
        .sink = completions.sink(),
        .wait_for = [this](std::size_t count) { return completions.wait_for(count); },
        .write =
            [this](std::span<const std::byte> bytes) { std::ranges::copy(bytes, engine.begin()); },
        .read = [this] { return engine; }};
  }

  std::vector<std::byte> engine;
  std::vector<std::byte> pool;
  Completions completions;
  std::unique_ptr<HostDevice> device;
};

TEST_SUITE("HostDevice") {
  TEST_CASE("a page holds a block's segments in order") {
    Fixture f;
    f.memory.fill(3, 77);
    std::vector<std::byte> expected(f.page_bytes);
    testing::fill_page(expected.data(), expected.size(), 77);

    REQUIRE(f.device->submit({1, Direction::kSave, Device::Event::kNow, {{3, 5 * f.page_bytes}}}));

    const auto done = f.completions.wait_for(1);
    CHECK(done[0].ticket == 1);
    CHECK(done[0].copied == 1);
    CHECK_FALSE(done[0].error);
    CHECK(std::equal(expected.begin(), expected.end(),
                     f.pool.begin() + static_cast<std::ptrdiff_t>(5 * f.page_bytes)));
  }

  TEST_CASE("a checksum is that of the page, in both directions, for the pages that request one") {
    // Segments of several pieces and of odd sizes, so that none is aligned with the hash's blocks.
    for (const std::size_t segment_bytes : {512UL, 100'003UL}) {
      Fixture f(2, 4, segment_bytes);
      std::vector<std::byte> page(f.page_bytes);
      testing::fill_page(page.data(), page.size(), 7);
      f.memory.fill(0, 7);
      f.memory.fill(1, 8);

      Device::Batch save = f.batch(1, Direction::kSave, {0, 1});
      save.copies[0].checksum = true;
      REQUIRE(f.device->submit(save));
      Device::Batch load{2, Direction::kLoad, Device::Event::kNow, {{3, 0, true}}};
      f.completions.wait_for(1);
      REQUIRE(f.device->submit(load));
      f.completions.wait_for(2);  // One at a time: two threads may end in either order.
      REQUIRE(f.device->submit(f.batch(3, Direction::kLoad, {1})));

      const auto done = f.completions.wait_for(3);
      const std::uint64_t right = PageChecksum::of(page);
      CHECK(right != kNoChecksum);
      CHECK(done[0].checksums == std::vector<std::uint64_t>{right, kNoChecksum});
      CHECK(done[1].checksums == std::vector<std::uint64_t>{right});
      CHECK(done[2].checksums.empty());
    }
  }

  TEST_CASE("bytes come back over random layouts, orders, threads and batches") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 30; ++round) {
      const std::size_t blocks = 1 + random() % 200;
      const std::size_t segments = 1 + random() % 5;
      std::size_t segment_bytes = 1 + random() % (round % 10 == 0 ? 200'000 : 2'000);
      std::size_t gap_bytes = 1 + random() % 100;
      if (round % 2 == 1) {  // Whole cache lines, of which smaller pieces are loaded another way.
        segment_bytes = 64 * (1 + random() % 300);
        gap_bytes = 16 * (random() % 8);
      }
      EngineMemory memory = engine_memory(segments, segment_bytes, blocks, gap_bytes);
      const std::uint64_t page_bytes = memory.layout().page_bytes();
      const std::uint64_t slot_bytes = slot_bytes_for(page_bytes);
      std::vector<std::byte> pool(slot_bytes * blocks);
      Completions completions;
      auto device = HostDevice::create({.threads = static_cast<int>(1 + random() % 4)}).value();
      REQUIRE(device->attach(memory.layout(), pool, completions.sink()));

      std::vector<std::uint32_t> slots(blocks);
      std::iota(slots.begin(), slots.end(), 0U);
      std::shuffle(slots.begin(), slots.end(), random);
      std::size_t batches = 0;
      const auto move_all = [&](Direction direction) {
        for (std::uint32_t block = 0; block < blocks;) {
          Device::Batch batch{++batches, direction, Device::Event::kNow, {}};
          const std::size_t size = 1 + random() % 40;
          for (std::size_t i = 0; i < size && block < blocks; ++i, ++block) {
            batch.copies.push_back({block, slots[block] * slot_bytes});
          }
          REQUIRE(device->submit(std::move(batch)));
        }
        completions.wait_for(batches);
      };
      for (std::uint32_t block = 0; block < blocks; ++block) memory.fill(block, block + 1000);
      move_all(Direction::kSave);
      for (std::uint32_t block = 0; block < blocks; ++block) memory.fill(block, 7);
      move_all(Direction::kLoad);

      std::size_t wrong = 0;
      for (std::uint32_t block = 0; block < blocks; ++block) {
        wrong += memory.holds(block, block + 1000) ? 0 : 1;
      }
      CHECK(wrong == 0);
      CHECK(memory.gaps_are_whole());
      for (const Device::Completion& completion : completions.wait_for(batches)) {
        CHECK_FALSE(completion.error);
      }
    }
  }

  TEST_CASE("pages of overlaid layouts come back, and no byte beside them changes") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 40; ++round) {
      OverlaidFixture f(1 + round % 3);
      testing::LayoutsRig rig = f.rig();
      testing::check_overlaid_layouts(rig, random);
    }
  }

  TEST_CASE("a batch of an unknown layout, or beyond its own, is rejected by name") {
    OverlaidFixture f(1);
    testing::LayoutsRig rig = f.rig();
    testing::check_bad_layouts(rig);
  }

  TEST_CASE("a load overtakes the waiting saves") {
    Fixture f;
    f.completions.hold();
    REQUIRE(f.device->submit(f.batch(1, Direction::kSave, {0})));
    f.completions.wait_for(1);  // The only thread is in the sink.
    REQUIRE(f.device->submit(f.batch(2, Direction::kSave, {1})));
    REQUIRE(f.device->submit(f.batch(3, Direction::kSave, {2})));
    REQUIRE(f.device->submit(f.batch(4, Direction::kLoad, {3})));

    f.completions.release();

    const auto done = f.completions.wait_for(4);
    CHECK(done[1].ticket == 4);
    CHECK(done[2].ticket == 2);
    CHECK(done[3].ticket == 3);
  }

  TEST_CASE(
      "a batch that is cancelled before it began copies nothing and ends before the waiting ones") {
    Fixture f;
    f.completions.hold();
    REQUIRE(f.device->submit(f.batch(1, Direction::kSave, {0})));
    f.completions.wait_for(1);
    f.memory.fill(2, 5);
    REQUIRE(f.device->submit(f.batch(2, Direction::kSave, {1})));
    REQUIRE(f.device->submit(f.batch(3, Direction::kSave, {2})));
    f.device->cancel(3);
    f.device->cancel(99);  // An unknown ticket.

    f.completions.release();

    const auto done = f.completions.wait_for(3);
    CHECK(done[1].ticket == 3);
    CHECK(done[1].copied == 0);
    REQUIRE(done[1].error);
    CHECK(done[1].error->code == Errc::kCancelled);
    const auto page = f.pool.begin() + static_cast<std::ptrdiff_t>(2 * f.page_bytes);
    CHECK(std::all_of(page, page + static_cast<std::ptrdiff_t>(f.page_bytes),
                      [](std::byte byte) { return byte == std::byte{0}; }));
    CHECK(done[2].copied == 1);
  }

  TEST_CASE(
      "after a cancel at any time, the counted pages are complete and no others are touched") {
    std::mt19937_64 random(testing::seed());
    for (int round = 0; round < 100; ++round) {
      Fixture f(1 + static_cast<int>(random() % 3), 64, 3'000);
      for (std::uint32_t block = 0; block < 64; ++block) f.memory.fill(block, block + 1);
      std::vector<std::uint32_t> order(64);
      std::iota(order.begin(), order.end(), 0U);
      std::shuffle(order.begin(), order.end(), random);
      REQUIRE(f.device->submit(f.batch(1, Direction::kSave, order)));
      for (std::size_t spins = random() % 5'000; spins > 0; --spins) asm volatile("" ::: "memory");

      if (round % 2 == 0) {
        f.device->cancel(1);
      } else {
        f.device->detach();
      }

      const auto done = f.completions.wait_for(1);
      std::vector<std::byte> expected(f.page_bytes);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < order.size(); ++i) {
        if (i < done[0].copied) {
          testing::fill_page(expected.data(), expected.size(), order[i] + 1);
        } else {
          std::fill(expected.begin(), expected.end(), std::byte{0});
        }
        wrong += std::equal(expected.begin(), expected.end(),
                            f.pool.begin() + static_cast<std::ptrdiff_t>(order[i] * f.page_bytes))
                     ? 0
                     : 1;
      }
      CHECK(wrong == 0);
      CHECK(done[0].error.has_value() == (done[0].copied < order.size()));
    }
  }

  TEST_CASE("every batch completes once, with concurrent submits, cancels and detaches") {
    std::mt19937_64 random(testing::seed());
    Fixture f(3, 12'000, 64, 10'000);
    std::vector<std::thread> users;
    std::mutex accepted_mutex;
    std::vector<std::uint64_t> accepted;
    for (std::uint64_t user = 0; user < 3; ++user) {
      users.emplace_back([&, user, seed = random()] {
        std::mt19937_64 mine(seed);
        for (std::uint64_t i = 0; i < 500; ++i) {
          const std::uint64_t ticket = user * 1000 + i;
          std::vector<std::uint32_t> blocks(mine() % 8);
          // Each batch has pages of its own: two batches on the same page would race in the test
          // itself.
          std::iota(blocks.begin(), blocks.end(), static_cast<std::uint32_t>(user * 4000 + i * 8));
          const bool sent = f.device->submit(f.batch(ticket, Direction::kSave, blocks)).has_value();
          if (sent) {
            const std::lock_guard lock(accepted_mutex);
            accepted.push_back(ticket);
          }
          if (mine() % 3 == 0) f.device->cancel(user * 1000 + mine() % (i + 1));
        }
      });
    }
    users.emplace_back([&] { f.device->detach(); });
    for (std::thread& user : users) user.join();
    f.device->detach();

    std::map<std::uint64_t, int> seen;
    for (const auto& completion : f.completions.wait_for(accepted.size()))
      ++seen[completion.ticket];
    CHECK(seen.size() == accepted.size());
    CHECK(
        std::all_of(seen.begin(), seen.end(), [](const auto& entry) { return entry.second == 1; }));
  }

  TEST_CASE("detach waits for the last completion, and another pool can be attached") {
    Fixture f;
    f.completions.hold();
    REQUIRE(f.device->submit(f.batch(1, Direction::kSave, {0})));
    f.completions.wait_for(1);
    std::atomic<bool> detached = false;
    std::thread other([&] {
      f.device->detach();
      detached = true;
    });
    CHECK_FALSE(detached);  // The sink has not returned.
    f.completions.release();
    other.join();

    CHECK(f.device->submit(f.batch(2, Direction::kSave, {0})).error().code == Errc::kGone);
    std::vector<std::byte> other_pool(f.pool.size());
    REQUIRE(f.device->attach(f.memory.layout(), other_pool, f.completions.sink()));
    REQUIRE(f.device->submit(f.batch(3, Direction::kSave, {0})));
    CHECK(f.completions.wait_for(2)[1].ticket == 3);
  }

  TEST_CASE("an empty batch completes too") {
    Fixture f;
    REQUIRE(f.device->submit(f.batch(1, Direction::kLoad, {})));
    const auto done = f.completions.wait_for(1);
    CHECK(done[0].copied == 0);
    CHECK_FALSE(done[0].error);
  }

  TEST_CASE("an event on the CPU is always now") {
    Fixture f;
    CHECK(f.device->record_event(Device::Queue::kDefault).value() == Device::Event::kNow);
  }

  TEST_CASE("invalid calls are rejected") {
    Fixture f(1, 4, 512, 2);

    CHECK(f.device->attach(f.memory.layout(), f.pool, f.completions.sink()).error().code ==
          Errc::kInvalidArgument);
    CHECK(f.device->submit({1, Direction::kSave, Device::Event::kNow, {{4, 0}}}).error().code ==
          Errc::kInvalidArgument);
    CHECK(f.device->submit({1, Direction::kSave, Device::Event::kNow, {{0, f.pool.size() - 1}}})
              .error()
              .code == Errc::kInvalidArgument);
    CHECK(f.device->submit({1, Direction::kSave, Device::Event::kNow, {{0, ~std::uint64_t{0}}}})
              .error()
              .code == Errc::kInvalidArgument);
    CHECK(HostDevice::create({.threads = 0}).error().code == Errc::kInvalidArgument);
    CHECK(HostDevice::create({.threads = 1, .max_batches = 0}).error().code ==
          Errc::kInvalidArgument);
    auto fresh = HostDevice::create({}).value();
    CHECK(fresh->submit({}).error().code == Errc::kGone);
    CHECK(fresh->attach(f.memory.layout(), {}, f.completions.sink()).error().code ==
          Errc::kInvalidArgument);

    // The sink has the first batch, and two more are the limit of its direction.
    f.completions.hold();
    REQUIRE(f.device->submit(f.batch(1, Direction::kSave, {0})));
    f.completions.wait_for(1);
    REQUIRE(f.device->submit(f.batch(2, Direction::kSave, {0})));
    CHECK(f.device->submit(f.batch(3, Direction::kSave, {0})));
    CHECK(f.device->submit(f.batch(4, Direction::kSave, {0})).error().code == Errc::kBusy);
    CHECK(f.device->submit(f.batch(5, Direction::kLoad, {0})));
    f.completions.release();
  }

  TEST_CASE("in a child of fork() no call hangs") {
    Fixture f(2);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      const bool gone =
          f.device->submit(f.batch(1, Direction::kSave, {0})).error().code == Errc::kGone;
      f.device->cancel(1);
      f.device->detach();
      f.device->remove_peer(1);
      const bool alone = f.device->add_peer(1, {}).error().code == Errc::kGone;
      f.device.reset();
      ::_exit(gone && alone ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }
}

}  // namespace
}  // namespace pegaflow
