// Copies out of the GPU memory of other engines, over the driver in software.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include <sys/syscall.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "tests/support/forked.h"
#include "tests/support/open_descriptors.h"
#include "tests/support/seed.h"
#include "tests/support/skip.h"
#include "tests/support/software_cuda.h"
#include "tests/unit/transport/cuda_fixture.h"
#include "transport/cuda/peer_mapping.h"

namespace pegaflow {
namespace {

using testing::CudaFixture;
using testing::CudaShape;
using testing::DeviceMemory;
using testing::open_descriptors;
using testing::SoftwareCuda;
using Direction = Device::Direction;

/// The size of an allocation of expandable segments.
constexpr std::uint64_t kPiece = 64 << 10;

UniqueFd pidfd_of(pid_t process) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
}

/// A device that reads, and the memory of a peer with blocks of the same size.
struct PeerFixture {
  explicit PeerFixture(const CudaShape& shape = {}, std::size_t peers_blocks = 24,
                       std::size_t peers_gap = 128,
                       const CudaDevice::Options& options = testing::small_options())
      : PeerFixture(0, shape, peers_blocks, peers_gap, options) {}
  /// The peer has expandable segments of pieces of this size; 0: it has none.
  explicit PeerFixture(std::uint64_t piece_bytes, const CudaShape& shape = {},
                       std::size_t peers_blocks = 24, std::size_t peers_gap = 128,
                       const CudaDevice::Options& options = testing::small_options())
      : software(std::make_shared<SoftwareCuda>(testing::seed())),
        f(shape, options, software),
        peers(expandable(software, piece_bytes), shape.segments, shape.segment_bytes, peers_blocks,
              peers_gap),
        process(pidfd_of(::getpid())) {
    software->use_expandable_segments(0);
  }
  static std::shared_ptr<SoftwareCuda> expandable(std::shared_ptr<SoftwareCuda> software,
                                                  std::uint64_t piece_bytes) {
    software->use_expandable_segments(piece_bytes);
    return software;
  }

  [[nodiscard]] PeerMemory shared() const {
    PeerMemory memory = f.device->share(peers.layout(), {}).value();
    memory.process = process.get();
    return memory;
  }
  [[nodiscard]] static Device::Batch batch(std::uint64_t ticket, std::uint64_t peer,
                                           const std::vector<std::uint32_t>& blocks,
                                           const std::vector<std::uint32_t>& peers_blocks) {
    Device::Batch batch{ticket, Direction::kLoad, Device::Event::kNow, {}};
    batch.peer = peer;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      batch.copies.push_back({blocks[i], peers_blocks[i]});
    }
    return batch;
  }

  std::shared_ptr<SoftwareCuda> software;
  CudaFixture f;
  DeviceMemory peers;
  UniqueFd process;
};

/// Different numbers below `below`.
std::vector<std::uint32_t> choose(std::mt19937_64& random, std::size_t count, std::size_t below) {
  std::vector<std::uint32_t> all(below);
  std::iota(all.begin(), all.end(), 0U);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  return all;
}

TEST_SUITE("a CudaDevice and the memory of other engines") {
  TEST_CASE("the peer's pages arrive in the blocks that were named, whatever their shape") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    std::mt19937_64 random(testing::seed());
    std::uint64_t piece_bytes = 0;
    SUBCASE("and by CUDA's handles") {}
    SUBCASE("and from expandable segments") { piece_bytes = kPiece; }
    // The last one has more pages than one launch.
    for (const CudaShape& shape : {CudaShape{3, 512, 16, 64}, CudaShape{1, 1, 16, 3},
                                   CudaShape{2, 100'000, 16, 8}, CudaShape{2, 64, 1'100, 0}}) {
      CAPTURE(shape.segment_bytes);
      const std::size_t peers_blocks = shape.blocks + 9;
      CudaDevice::Options options = testing::small_options();
      if (shape.blocks > cuda::kPullPages) options.slice_bytes = options.staging_bytes = 32 << 20;
      PeerFixture p(piece_bytes, shape, peers_blocks, 128, options);
      CHECK(p.shared().mapped.has_value() == (piece_bytes != 0));
      for (std::uint32_t block = 0; block < peers_blocks; ++block) p.peers.fill(block, block + 50);
      for (std::uint32_t block = 0; block < shape.blocks; ++block) p.f.memory.fill(block, 7);
      REQUIRE(p.f.device->add_peer(3, p.shared()));
      const std::size_t count = shape.blocks - 3;
      const std::vector<std::uint32_t> to = choose(random, count, shape.blocks);
      const std::vector<std::uint32_t> from = choose(random, count, peers_blocks);

      REQUIRE(p.f.device->submit(PeerFixture::batch(1, 3, to, from)));

      const Device::Completion done = p.f.completions.wait_for(1).front();
      CHECK(done.copied == count);
      CHECK_FALSE(done.error);
      std::vector<std::uint64_t> seeds(shape.blocks, 7);
      for (std::size_t i = 0; i < count; ++i) seeds[to[i]] = from[i] + 50;
      CHECK(p.f.memory.wrong(seeds).empty());
      CHECK(p.f.memory.gaps_are_whole());
    }
  }

  TEST_CASE("loads from the pool and from a peer run side by side") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    PeerFixture p;
    for (std::uint32_t block = 0; block < 16; ++block) {
      p.peers.fill(block, block + 50);
      p.f.memory.fill(block, block + 80);
    }
    REQUIRE(p.f.device->submit(p.f.batch(1, Direction::kSave, {0, 1, 2, 3})));
    p.f.completions.wait_for(1);
    for (std::uint32_t block = 0; block < 4; ++block) p.f.memory.fill(block, 7);
    REQUIRE(p.f.device->add_peer(1, p.shared()));

    REQUIRE(p.f.device->submit(p.f.batch(2, Direction::kLoad, {0, 1})));
    REQUIRE(p.f.device->submit(PeerFixture::batch(3, 1, {4, 5, 6}, {2, 0, 9})));
    REQUIRE(p.f.device->submit(p.f.batch(4, Direction::kLoad, {2, 3})));

    for (const Device::Completion& done : p.f.completions.wait_for(4)) CHECK_FALSE(done.error);
    std::vector<std::uint64_t> seeds{80, 81, 82, 83, 52, 50, 59};
    for (std::uint64_t block = 7; block < 16; ++block) seeds.push_back(block + 80);
    CHECK(p.f.memory.wrong(seeds).empty());
  }

  TEST_CASE("memory of a peer is closed when the peer is forgotten, or the pool is left") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    std::uint64_t piece_bytes = 0;
    SUBCASE("by handles") {}
    SUBCASE("of expandable segments") { piece_bytes = kPiece; }
    PeerFixture p(piece_bytes);
    const std::size_t before = p.software->live_objects();
    REQUIRE(p.f.device->add_peer(1, p.shared()));
    CHECK(p.software->live_objects() > before);
    SUBCASE("forgotten") {
      p.f.device->remove_peer(1);
      p.f.device->remove_peer(2);
      CHECK(p.software->live_objects() == before);
      CHECK(p.f.device->submit(PeerFixture::batch(1, 1, {0}, {0})).error().code ==
            Errc::kInvalidArgument);
    }
    SUBCASE("left") {
      p.f.device->detach();
      CHECK(p.software->live_objects() < before);  // And what the pool needed.
    }
  }

  TEST_CASE("a peer that cannot be read is refused with the reason, and leaves nothing mapped") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    PeerFixture p;
    const std::size_t before = p.software->live_objects();
    PeerMemory memory = p.shared();
    Errc expected = Errc::kRefused;
    const char* reason = "";
    std::uint64_t name = 1;
    SUBCASE("ordinary memory") {
      memory.handles.clear();
      reason = "not on a GPU";
    }
    SUBCASE("memory of another host") {
      memory.process = -1;
      memory.network.emplace();
      reason = "this device has no network";
    }
    SUBCASE("segments of another size") {
      memory.segments[1].size_bytes += 1;
      reason = "differ in number or size";
    }
    SUBCASE("a handle that cannot be opened") {
      p.software->refuse_sharing();
      reason = "cannot map the memory of the other engine";
    }
    SUBCASE("fewer handles than segments") {
      memory.handles.pop_back();
      expected = Errc::kInvalidArgument;
      reason = "2 handles for 3 segments";
    }
    SUBCASE("blocks beyond the allocation") {
      memory.block_count += 1;
      expected = Errc::kInvalidArgument;
      reason = "is beyond the";
    }
    SUBCASE("an offset beyond the allocation") {
      memory.segments[2].base += std::size_t{1} << 40;
      expected = Errc::kInvalidArgument;
      reason = "is beyond the";
    }
    SUBCASE("the name 0") {
      name = 0;
      expected = Errc::kInvalidArgument;
      reason = "the name 0";
    }
    const auto refused = p.f.device->add_peer(name, memory);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == expected);
    CHECK(refused.error().detail.find(reason) != std::string::npos);
    CHECK(p.software->live_objects() == before);
  }

  TEST_CASE("expandable segments that cannot be mapped are refused, and leave nothing mapped") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    PeerFixture p(kPiece);
    const std::size_t before = p.software->live_objects();
    PeerMemory memory = p.shared();
    MappedMemory& mapped = *memory.mapped;
    REQUIRE(mapped.ranges.size() == 3);
    Errc expected = Errc::kInvalidArgument;
    const char* reason = "";
    SUBCASE("the driver refuses") {
      p.software->refuse_sharing();
      expected = Errc::kRefused;
      reason = "cannot map the memory of the other engine";
    }
    SUBCASE("an allocation that is larger than it was said to be when it was exported") {
      mapped.ranges[1][0] += kPiece;
      expected = Errc::kRefused;
      reason = "cannot map the memory of the other engine";
    }
    SUBCASE("no descriptors") {
      mapped.descriptors.reset();
      reason = "no socket with descriptors";
    }
    SUBCASE("a descriptor of something else") {
      mapped.descriptors = std::make_shared<const UniqueFd>(pidfd_of(::getpid()));
      reason = "no socket with descriptors";
    }
    SUBCASE("fewer descriptors than allocations") {
      mapped.ranges[2].push_back(kPiece);
      reason = "a box with";
    }
    SUBCASE("more descriptors than allocations") {
      mapped.ranges[2].pop_back();
      mapped.ranges[2].push_back(kPiece);
      mapped.ranges.erase(mapped.ranges.begin());
      reason = "a box with more than";
    }
    SUBCASE("an allocation without bytes") {
      mapped.ranges[0].push_back(0);
      reason = "an allocation of 0 bytes";
    }
    SUBCASE("sizes that overflow") {
      mapped.ranges[0].assign(2, ~std::uint64_t{0});
      reason = "an allocation of";
    }
    SUBCASE("a range that does not exist") {
      mapped.range_of[1] = 3;
      reason = "range 3 of 3";
    }
    SUBCASE("a segment without a range") {
      mapped.range_of.pop_back();
      reason = "2 ranges for 3 segments";
    }
    SUBCASE("blocks beyond the range") {
      memory.block_count += 1'000;
      reason = "is beyond the";
    }
    const auto refused = p.f.device->add_peer(1, memory);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == expected);
    INFO(refused.error().detail);
    CHECK(refused.error().detail.find(reason) != std::string::npos);
    CHECK(p.software->live_objects() == before);
  }

  TEST_CASE("segments share ranges, of which the last one grows") {
    PeerFixture p;
    p.software->use_expandable_segments(kPiece);
    const DeviceMemory whole(p.software, 1, 4 * kPiece, 1, 0);
    std::byte* const base = whole.layout().segments()[0].base;
    const PageLayout layout = PageLayout::create({{base + 64, 512, 256},
                                                  {base + kPiece + 64, 512, 256},
                                                  {base + kPiece - 512, 512, 256},
                                                  {base + 2 * kPiece - 256, 512, 256}},
                                                 2)
                                  .value();
    const PeerMemory memory = p.f.device->share(layout, {}).value();
    REQUIRE(memory.mapped);
    CHECK(memory.handles.empty());
    CHECK(memory.mapped->range_of == std::vector<std::uint32_t>{0, 1, 2, 2});
    using Sizes = std::vector<std::vector<std::uint64_t>>;
    CHECK(memory.mapped->ranges == Sizes{{kPiece}, {kPiece}, {kPiece, kPiece, kPiece}});
  }

  TEST_CASE("each page is read from its place, wherever the segments lie in the allocations") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    CAPTURE(testing::seed());
    std::mt19937_64 random(testing::seed());
    const auto below = [&](std::uint64_t count) { return random() % count; };
    for (int round = 0; round < 100; ++round) {
      CAPTURE(round);
      const std::size_t bytes = (1 + below(40)) * (below(2) == 0 ? 16 : 7);
      PeerFixture p({1 + below(6), bytes, 2 + below(20), 64});
      // Areas of several allocations each, or of one.
      const std::uint64_t piece = 4096 * (1 + below(4));
      p.software->use_expandable_segments(below(4) == 0 ? 0 : piece);
      std::vector<std::pair<std::byte*, std::uint64_t>> areas;
      for (std::uint64_t count = 1 + below(3); count != 0; --count) {
        const std::uint64_t size = piece * (1 + below(20));
        cuda::DeviceAddress area = 0;
        REQUIRE(p.software->allocate(size, area) == cuda::kSuccess);
        // NOLINTNEXTLINE(performance-no-int-to-ptr): memory of the software driver is the host's.
        areas.emplace_back(reinterpret_cast<std::byte*>(area), size);
        for (std::uint64_t i = 0; i < size; ++i) areas.back().first[i] = std::byte(random());
      }
      const auto own = p.f.memory.layout();
      const std::size_t blocks = 1 + below(4);
      std::vector<Segment> segments;
      for (std::size_t i = 0; i < own.segments().size(); ++i) {
        const auto& [base, size] = areas[below(areas.size())];
        const std::uint64_t stride = bytes + below(size / blocks - bytes + 1);
        const std::uint64_t extent = (blocks - 1) * stride + bytes;
        REQUIRE(extent <= size);
        segments.push_back({base + below(size - extent + 1), stride, bytes});
      }
      PeerMemory memory =
          p.f.device->share(PageLayout::create(segments, blocks).value(), {}).value();
      memory.process = p.process.get();
      REQUIRE(p.f.device->add_peer(1, memory));
      std::vector<std::uint32_t> to(own.block_count());
      std::iota(to.begin(), to.end(), 0U);
      std::vector<std::uint32_t> from;
      for (std::size_t i = 0; i < to.size(); ++i) {
        from.push_back(static_cast<std::uint32_t>(below(blocks)));
      }
      REQUIRE(p.f.device->submit(PeerFixture::batch(1, 1, to, from)));
      CHECK_FALSE(p.f.completions.wait_for(1).front().error);
      for (std::size_t i = 0; i < to.size(); ++i) {
        for (std::size_t s = 0; s < segments.size(); ++s) {
          const Segment& mine = own.segments()[s];
          REQUIRE(std::memcmp(mine.base + i * mine.block_stride_bytes,
                              segments[s].base + from[i] * segments[s].block_stride_bytes,
                              bytes) == 0);
        }
      }
      p.f.device->remove_peer(1);
      for (const auto& [base, size] : areas) {
        p.software->release(reinterpret_cast<cuda::DeviceAddress>(base));
      }
      p.software->use_expandable_segments(0);
    }
  }

  TEST_CASE("layers side by side in one tensor are exported once") {
    PeerFixture p;
    p.software->use_expandable_segments(8192);
    const DeviceMemory tensor(p.software, 1, 64 * 2048, 32, 0);
    std::byte* const base = tensor.layout().segments()[0].base;
    std::vector<Segment> layers;
    for (std::size_t i = 0; i < 64; ++i) layers.push_back({base + i * 2048, 64 * 2048, 2048});
    const PeerMemory memory = p.f.device->share(PageLayout::create(layers, 32).value(), {}).value();
    REQUIRE(memory.mapped);
    CHECK(memory.mapped->ranges.size() == 1);
    CHECK(memory.mapped->ranges[0].size() == 32 * 64 * 2048 / 8192);
  }

  TEST_CASE("memory that CUDA does not share is refused with the address and the fix") {
    std::uint64_t piece_bytes = 0;
    SUBCASE("of one allocation") {}
    SUBCASE("of several") { piece_bytes = kPiece; }
    PeerFixture p(piece_bytes);
    p.software->refuse_sharing();
    const auto refused = p.f.device->share(p.peers.layout(), {});
    CHECK(refused.error().code == Errc::kRefused);
    CHECK(refused.error().detail.find("no sleep mode") != std::string::npos);
  }

  TEST_CASE(
      "expandable segments of thousands of allocations are mapped, and close what they open") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    // More than one message of descriptors.
    PeerFixture p(4096, {2, 4096, 300, 0}, 300, 0);
    const PeerMemory memory = p.shared();
    REQUIRE(memory.mapped);
    CHECK(memory.mapped->ranges.size() == 2);
    CHECK(memory.mapped->ranges[0].size() == 300);
    const std::size_t open = open_descriptors();
    for (std::uint64_t peer = 1; peer <= 3; ++peer) REQUIRE(p.f.device->add_peer(peer, memory));
    for (std::uint32_t block = 0; block < 300; ++block) {
      p.peers.fill(block, block + 50);
      p.f.memory.fill(block, 7);
    }
    REQUIRE(p.f.device->submit(PeerFixture::batch(1, 2, {0, 1, 2}, {299, 0, 130})));
    CHECK_FALSE(p.f.completions.wait_for(1).front().error);
    std::vector<std::uint64_t> seeds{349, 50, 180};
    seeds.resize(300, 7);
    CHECK(p.f.memory.wrong(seeds).empty());
    for (std::uint64_t peer = 1; peer <= 3; ++peer) p.f.device->remove_peer(peer);
    CHECK(open_descriptors() == open);
  }

  TEST_CASE("pages of a process that has ended do not count") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    testing::Forked other([] {});
    PeerFixture p;
    PeerMemory memory = p.shared();
    const UniqueFd process = pidfd_of(other.pid());
    memory.process = process.get();
    REQUIRE(p.f.device->add_peer(1, memory));
    p.software->hold();
    REQUIRE(p.f.device->submit(PeerFixture::batch(1, 1, {0, 1}, {2, 3})));
    other.kill();
    p.software->resume();

    const Device::Completion done = p.f.completions.wait_for(1).front();

    CHECK(done.copied == 0);
    CHECK(done.error->code == Errc::kGone);
    CHECK(p.f.device->add_peer(2, memory).error().code == Errc::kGone);
  }

  TEST_CASE("a peer is read by loads of its blocks only") {
    if (!testing::has_kernels()) PEGA_SKIP("built without CUDA kernels");
    PeerFixture p;
    REQUIRE(p.f.device->add_peer(1, p.shared()));
    Device::Batch save = PeerFixture::batch(1, 1, {0}, {0});
    save.direction = Direction::kSave;
    CHECK(p.f.device->submit(save).error().code == Errc::kInvalidArgument);
    CHECK(p.f.device->submit(PeerFixture::batch(1, 1, {0}, {24})).error().code ==
          Errc::kInvalidArgument);
    CHECK(p.f.device->submit(PeerFixture::batch(1, 2, {0}, {0})).error().code ==
          Errc::kInvalidArgument);
  }

  TEST_CASE("an event is reported although the copies of an earlier batch fill the device") {
    PeerFixture p({2, 100'000, 16, 8});
    const Device::Event after = p.f.device->record_event(Device::Queue::kDefault).value();
    p.software->settle();
    p.software->hold();
    std::vector<std::uint32_t> all(16);
    std::iota(all.begin(), all.end(), 0U);
    REQUIRE(p.f.device->submit(p.f.batch(1, Direction::kSave, all)));
    REQUIRE(p.f.device->submit({.ticket = 2, .after = after, .copies = {}}));

    CHECK(p.f.completions.wait_for(1).front().ticket == 2);

    p.software->resume();
    CHECK(p.f.completions.wait_for(2).back().copied == 16);
  }

  TEST_CASE("batches without copies leave the others their places") {
    PeerFixture p({}, 24, 128, testing::limited_options(1));
    cuda::Stream engine = nullptr;
    REQUIRE(p.software->create_stream(0, engine) == cuda::kSuccess);
    p.software->block(engine, true);
    const auto queue = Device::Queue{reinterpret_cast<std::uintptr_t>(engine)};
    const Device::Event after = p.f.device->record_event(queue).value();
    for (std::uint64_t mark = 1; mark <= 3; ++mark) {
      REQUIRE(p.f.device->submit({.ticket = mark, .after = after, .copies = {}}));
    }
    REQUIRE(p.f.device->submit(p.f.batch(4, Direction::kSave, {0})));
    CHECK(p.f.completions.wait_for(1).front().ticket == 4);
    REQUIRE(p.f.device->submit(p.f.batch(5, Direction::kSave, {1})));
    p.software->block(engine, false);
    CHECK(p.f.completions.wait_for(5).size() == 5);
    REQUIRE(p.software->destroy_stream(engine) == cuda::kSuccess);
  }

  TEST_CASE("a batch without copies completes once the engine's work is over") {
    PeerFixture p;
    testing::DeviceMemory memory(p.software, 1, 64, 1);
    cuda::Stream engine = nullptr;
    REQUIRE(p.software->create_stream(0, engine) == cuda::kSuccess);
    p.software->block(engine, true);
    const auto queue = Device::Queue{reinterpret_cast<std::uintptr_t>(engine)};
    const Device::Event after = p.f.device->record_event(queue).value();
    REQUIRE(p.f.device->submit({.ticket = 1, .after = after, .copies = {}}));
    REQUIRE(p.f.device->submit({.ticket = 2, .after = after, .copies = {}}));
    REQUIRE(p.f.device->submit(p.f.batch(3, Direction::kSave, {0})));  // After nothing.
    CHECK(p.f.completions.wait_for(1).front().ticket == 3);

    SUBCASE("each one") {}
    SUBCASE("unless it is cancelled") {
      p.f.device->cancel(2);
      const Device::Completion cancelled = p.f.completions.wait_for(2).back();
      CHECK(cancelled.ticket == 2);
      CHECK(cancelled.error->code == Errc::kCancelled);
    }
    p.software->block(engine, false);

    const auto all = p.f.completions.wait_for(3);
    const auto first = std::ranges::find(all, std::uint64_t{1}, &Device::Completion::ticket);
    CHECK(first != all.end());
    CHECK_FALSE(first->error);
    REQUIRE(p.software->destroy_stream(engine) == cuda::kSuccess);
  }
}

}  // namespace
}  // namespace pegaflow
