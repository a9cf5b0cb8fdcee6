#pragma once
/// \file
/// The requirements for a NetworkDevice over any Fabric. A backend's test includes this file once
/// and names its type: `TEST_CASE_TEMPLATE_INVOKE(network_conformance, TcpBackend);`. The type has
/// `static Result<std::unique_ptr<Fabric>> make(Fabric::CompletionSink)`, kRounds, the number of
/// fabrics that a randomized test may make, and kMayEnd: whether a fabric may end while another one
/// connects to it or reads it.

#include <chrono>
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>

#include "tests/support/seed.h"
#include "tests/unit/transport/network_engines.h"

namespace pegaflow::testing {

/// Blocks that arrive over random layouts, and bytes that no copy may change.
template <typename Backend>
void check_random_layouts(std::mt19937_64& random) {
  std::vector<std::uint64_t> sizes(1 + random() % 6);
  for (std::uint64_t& size : sizes) size = 1 + random() % 20'000;
  const auto random_place = [&](std::span<std::byte> memory) {
    const std::uint64_t gap = random() % 3 == 0 ? 0 : random() % 100;
    return place(memory, sizes, 1 + random() % 60, static_cast<Placement>(random() % 3), gap);
  };
  NetworkEngine owner(&Backend::make, random_place);
  NetworkEngine reader(&Backend::make, random_place);
  harness::write_pattern(owner.bytes(), 1);
  harness::write_pattern(reader.bytes(), 2);
  REQUIRE(reader.device->add_peer(kOtherHost, owner.shared()));

  std::vector<std::uint32_t> order(reader.layout.block_count());
  std::iota(order.begin(), order.end(), 0U);
  if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);
  // What a copy between the two would make of the reader's memory.
  std::vector<std::byte> expected(reader.bytes().begin(), reader.bytes().end());
  std::size_t batches = 0;
  for (std::size_t next = 0; next < order.size();) {
    std::vector<Device::Copy> copies;
    const bool in_a_row = random() % 2 == 0;
    for (std::size_t left = 1 + random() % 30; left > 0 && next < order.size(); --left, ++next) {
      const std::uint64_t blocks = owner.layout.block_count();
      copies.push_back({order[next], in_a_row ? order[next] % blocks : random() % blocks});
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const auto from = owner.piece(owner.blocks.memory, i, copies.back().pool_offset);
        const auto to = reader.piece(reader.blocks.memory, i, order[next]);
        std::ranges::copy(from, expected.begin() + (to.data() - reader.bytes().data()));
      }
    }
    REQUIRE(reader.device->submit(load(++batches, std::move(copies))));
  }

  for (const Device::Completion& done : reader.completions.wait_for(batches)) {
    CHECK_FALSE(done.error);
  }
  CHECK(std::ranges::equal(reader.bytes(), expected));
}

/// Writes each time to one block of an engine, under its guard, until it is stopped.
class Rewriter {
 public:
  Rewriter(NetworkEngine& engine, std::uint64_t seed) : engine_(engine) {
    for (std::uint64_t block = 0; block < engine_.layout.block_count(); ++block) rewrite(block);
    thread_ = std::thread([this, seed] {
      std::mt19937_64 random(seed);
      while (!stop_.load()) {
        rewrite(random() % engine_.layout.block_count());
        spin(random() % 200'000);
      }
    });
  }
  ~Rewriter() {
    stop_.store(true);
    thread_.join();
  }
  Rewriter(const Rewriter&) = delete;
  Rewriter& operator=(const Rewriter&) = delete;

 private:
  void rewrite(std::uint64_t block) {
    const std::uint64_t value = ++last_value_;
    engine_.guard(block).store(0);
    engine_.write(block, value);
    engine_.guard(block).store(value);
  }

  NetworkEngine& engine_;
  std::uint64_t last_value_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// Pages that arrived before `copied` are whole, and the engine's memory stays as it was when the
/// batch completed.
inline void check_ended(NetworkEngine& reader, const Device::Completion& done,
                        std::uint64_t first_seed) {
  for (std::size_t block = 0; block < done.copied; ++block) {
    CHECK(reader.holds(block, first_seed + block));
  }
  CHECK(done.error.has_value() == (done.copied < reader.layout.block_count()));
  if (done.error) CHECK(done.guards.empty());
  const std::vector<std::byte> after(reader.bytes().begin(), reader.bytes().end());
  reader.device.reset();
  CHECK(std::ranges::equal(reader.bytes(), after));
}

TEST_CASE_TEMPLATE_DEFINE("a network device", Backend, network_conformance) {
  SUBCASE("brings blocks over random layouts and batches, and changes no other byte") {
    std::mt19937_64 random(seed());
    for (int round = 0; round < Backend::kRounds; ++round) check_random_layouts<Backend>(random);
  }

  SUBCASE("returns guards in the order of the batch, also more than it reads at once") {
    constexpr std::uint32_t kCount = 3000;
    NetworkEngine owner(&Backend::make, four_segments(512, 8), 1 << 20, kCount);
    NetworkEngine reader(&Backend::make, four_segments(512, 8));
    for (std::uint32_t i = 0; i < kCount; ++i) owner.guard(i).store(1'000'000 + i);
    owner.write(3, 99);
    REQUIRE(reader.device->add_peer(kOtherHost, owner.shared()));
    std::vector<std::uint32_t> places{7, 7, kCount - 1, 0};
    std::mt19937_64 random(seed());
    for (int i = 0; i < 2000; ++i) places.push_back(static_cast<std::uint32_t>(random() % kCount));

    REQUIRE(reader.device->submit(load(1, {{5, 3}}, places)));

    const Device::Completion done = reader.completions.wait_for(1)[0];
    CHECK(reader.holds(5, 99));
    REQUIRE(done.guards.size() == places.size());
    for (std::size_t i = 0; i < places.size(); ++i) CHECK(done.guards[i] == 1'000'000 + places[i]);
  }

  SUBCASE("reads pages out of a pool without guards") {
    NetworkEngine reader(&Backend::make, four_segments(1024, 8));
    constexpr std::size_t kPages = 16;
    TwiceMapped pool(kPages * kSlotAlignment);
    auto owner = Backend::make([](Fabric::Completion&&) {}).value();
    const RegionId region = owner->register_region(pool.memory.bytes()).value();
    REQUIRE(owner->lend(region, TimePoint::max()));
    for (std::size_t page = 0; page < kPages; ++page) {
      for (std::size_t i = 0; i < 4; ++i) {
        harness::write_pattern(pool.alias.bytes().subspan(page * kSlotAlignment + i * 1024, 1024),
                               harness::pattern_seed(50 + page, i));
      }
    }
    const PeerMemory peer = pool_as_peer(reader.layout, owner->describe()).value();
    CHECK(peer.block_count == kPages);
    REQUIRE(reader.device->add_peer(kOtherHost, peer));
    REQUIRE(reader.device->submit(load(1, {{0, 15}, {1, 0}, {7, 7}})));
    const Device::Completion done = reader.completions.wait_for(1)[0];
    CHECK_FALSE(done.error);
    CHECK(done.copied == 3);
    CHECK(done.guards.empty());
    CHECK(reader.holds(0, 50 + 15));
    CHECK(reader.holds(1, 50));
    CHECK(reader.holds(7, 50 + 7));
    CHECK(reader.device->submit(load(2, {{0, 16}})).error().code == Errc::kInvalidArgument);
    CHECK(reader.device->submit(load(3, {{0, 1}}, {0})).error().code == Errc::kInvalidArgument);
    reader.device.reset();
  }

  SUBCASE("completes batches without pages, with their guards") {
    NetworkEngine owner(&Backend::make, four_segments(512, 8));
    NetworkEngine reader(&Backend::make, four_segments(512, 8));
    owner.guard(4).store(44);
    REQUIRE(reader.device->add_peer(kOtherHost, owner.shared()));

    REQUIRE(reader.device->submit(load(1, {}, {4, 5})));
    CHECK(reader.completions.wait_for(1)[0].guards == std::vector<std::uint64_t>{44, 0});
    owner.guard(4).store(0);
    REQUIRE(reader.device->submit(load(2, {}, {4})));
    CHECK(reader.completions.wait_for(2)[1].guards == std::vector<std::uint64_t>{0});
    REQUIRE(reader.device->submit(load(3, {})));
    const Device::Completion empty = reader.completions.wait_for(3)[2];
    CHECK(empty.ticket == 3);
    CHECK(empty.copied == 0);
    CHECK_FALSE(empty.error);
  }

  SUBCASE("reads a device that reads it at the same time") {
    NetworkEngine one(&Backend::make, four_segments(3'000, 64));
    NetworkEngine other(&Backend::make, four_segments(3'000, 64));
    for (std::uint64_t block = 0; block < 32; ++block) {
      one.write(block, 100 + block);
      other.write(block, 200 + block);
    }
    REQUIRE(one.device->add_peer(kOtherHost, other.shared()));
    REQUIRE(other.device->add_peer(kOtherHost, one.shared()));

    for (std::uint32_t i = 0; i < 32; ++i) {
      REQUIRE(one.device->submit(load(i + 1, {{32 + i, i}}, {i})));
      REQUIRE(other.device->submit(load(i + 1, {{32 + i, i}}, {i})));
    }

    for (NetworkEngine* const engine : {&one, &other}) {
      for (const Device::Completion& done : engine->completions.wait_for(32)) {
        CHECK_FALSE(done.error);
      }
    }
    for (std::uint64_t block = 0; block < 32; ++block) {
      CHECK(one.holds(block, 100 + block));
      CHECK(one.holds(32 + block, 200 + block));
      CHECK(other.holds(block, 200 + block));
      CHECK(other.holds(32 + block, 100 + block));
    }
  }

  SUBCASE("writes nothing after the completion of a batch that was cancelled or lost its peer") {
    std::mt19937_64 random(seed());
    for (int round = 0; round < Backend::kRounds; ++round) {
      auto owner =
          std::make_unique<NetworkEngine>(&Backend::make, four_segments(16'384, 256), 16 << 20);
      NetworkEngine reader(&Backend::make, four_segments(16'384, 256), 16 << 20);
      for (std::uint64_t block = 0; block < 256; ++block) owner->write(block, 1000 + block);
      REQUIRE(reader.device->add_peer(kOtherHost, owner->shared()));
      // Half of the rounds end while the two connect, where the backend can.
      const std::size_t before = !Backend::kMayEnd || round % 2 == 0 ? 1 : 0;
      if (before == 1) {
        REQUIRE(reader.device->submit(load(3, {{255, 255}})));
        reader.completions.wait_for(1);
      }
      REQUIRE(reader.device->submit(load_all(1, reader.layout, {0, 1})));
      spin(random() % 8'000'000);

      std::optional<Errc> reason;
      switch (round % (Backend::kMayEnd ? 3 : 2)) {
        case 0:
          reader.device->cancel(1);
          reason = Errc::kCancelled;
          break;
        case 1:
          reader.device->detach();
          reason = Errc::kCancelled;
          CHECK(error_of(reader.device->submit(load(2, {{0, 0}}))).code == Errc::kGone);
          break;
        default:
          owner->device.reset();
          break;
      }

      const Device::Completion done = reader.completions.wait_for(before + 1)[before];
      if (done.error && reason) CHECK(done.error->code == *reason);
      if (done.error && !reason) {
        CAPTURE(done.error->detail);
        const Errc code = done.error->code;
        CHECK((code == Errc::kPeerLost || code == Errc::kGone || code == Errc::kTimeout));
      }
      check_ended(reader, done, 1000);
    }
  }

  SUBCASE("proves by a guard that its block was not written meanwhile") {
    constexpr std::uint32_t kBlocks = 32;
    NetworkEngine owner(&Backend::make, four_segments(4'096, kBlocks), 1 << 20, kBlocks);
    NetworkEngine reader(&Backend::make, four_segments(4'096, kBlocks));
    std::mt19937_64 random(seed());
    const Rewriter rewriter(owner, random());
    REQUIRE(reader.device->add_peer(kOtherHost, owner.shared()));
    std::size_t proven = 0;
    std::size_t changed = 0;
    const auto end = std::chrono::steady_clock::now() + kHang;

    for (std::uint64_t ticket = 1; proven < 300 || changed < 30; ++ticket) {
      REQUIRE(std::chrono::steady_clock::now() < end);
      std::vector<Device::Copy> copies;
      std::vector<std::uint32_t> places;
      std::vector<std::uint64_t> values;
      for (std::uint32_t i = 0; i < 1 + random() % 4; ++i) {
        places.push_back(static_cast<std::uint32_t>(random() % kBlocks));
        copies.push_back({i, places.back()});
        values.push_back(owner.guard(places.back()).load());
      }
      REQUIRE(reader.device->submit(load(ticket, copies, places)));
      const Device::Completion done = reader.completions.wait_for(ticket)[ticket - 1];
      if (done.error) {
        // A lane that checks what it transfers rejects bytes that change meanwhile.
        CHECK(done.error->code == Errc::kCorrupt);
        CHECK(done.guards.empty());
        ++changed;
        continue;
      }
      for (std::size_t i = 0; i < done.guards.size(); ++i) {
        if (values[i] == 0 || done.guards[i] != values[i]) {
          ++changed;
          continue;
        }
        ++proven;
        REQUIRE(reader.holds(i, values[i]));
      }
    }
  }
}

}  // namespace pegaflow::testing
