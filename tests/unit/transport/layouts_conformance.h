#pragma once
/// \file
/// The behavior of every Device with several layouts, over memory that it is given.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "base/page_layout.h"
#include "transport/device.h"

namespace pegaflow::testing {

/// A device that is not attached, and memory of its engine and of a pool.
struct LayoutsRig {
  Device& device;
  std::byte* engine;            ///< kEngineBytes, as the device addresses them.
  std::span<std::byte> pool;    ///< kPoolBytes.
  Device::CompletionSink sink;  ///< Receives the completions;
  std::function<std::vector<Device::Completion>(std::size_t)> wait_for;  ///< waits for so many.
  std::function<void(std::span<const std::byte>)> write;  ///< Sets the engine's memory.
  std::function<std::vector<std::byte>()> read;

  static constexpr std::size_t kEngineBytes = 1 << 20;
  static constexpr std::size_t kPoolBytes = 1 << 20;
};

/// Groups of layers over the same tensors, as vLLM lays them out: a tensor has the stride of the
/// largest page, a block belongs to one group, and a group with fewer bytes leaves the rest unused.
class OverlaidGroups {
 public:
  OverlaidGroups(std::byte* engine, std::mt19937_64& random) {
    blocks_ = static_cast<std::uint32_t>(8 + random() % 24);
    const std::size_t groups = 2 + random() % 4;
    const std::size_t tensors = 1 + random() % 3;
    // Some so small that the pages of all groups fit into the slot of one.
    const std::size_t stride = 16 + random() % (random() % 2 == 0 ? 400 : 9'000);
    for (std::size_t group = 0; group < groups; ++group) {
      std::vector<Segment> segments;
      for (std::size_t tensor = 0; tensor < tensors; ++tensor) {
        if (tensor != 0 && random() % 4 == 0) break;  // A group with fewer layers.
        segments.push_back({.base = engine + tensor * blocks_ * stride,
                            .block_stride_bytes = stride,
                            .size_bytes = random() % 3 == 0 ? stride : 1 + random() % stride});
      }
      layouts_.push_back(PageLayout::create(std::move(segments), blocks_).value());
    }
  }
  [[nodiscard]] std::span<const PageLayout> layouts() const { return layouts_; }
  [[nodiscard]] std::uint32_t blocks() const { return blocks_; }
  [[nodiscard]] std::uint64_t page_bytes() const {
    return std::accumulate(
        layouts_.begin(), layouts_.end(), std::uint64_t{0},
        [](std::uint64_t sum, const PageLayout& layout) { return sum + layout.page_bytes(); });
  }

 private:
  std::vector<PageLayout> layouts_;
  std::uint32_t blocks_ = 0;
};

/// The copies of a batch by memcpy, over models of both memories.
inline void model_batch(const Device::Batch& batch, const PageLayout& layout,
                        const std::byte* engine, std::span<std::byte> memory,
                        std::span<std::byte> pool) {
  for (const Device::Copy& copy : batch.copies) {
    std::byte* page = pool.data() + copy.pool_offset;
    for (const Segment& segment : layout.segments()) {
      std::byte* const piece =
          memory.data() + (segment.base - engine) + copy.block * segment.block_stride_bytes;
      const bool save = batch.direction == Device::Direction::kSave;
      std::memcpy(save ? page : piece, save ? piece : page, segment.size_bytes);
      page += segment.size_bytes;
    }
  }
}

/// A checksum that was computed is that of its page, which `pool` has.
inline void check_checksums(const Device::Batch& batch, std::uint64_t page_bytes,
                            std::span<const Device::Completion> ended,
                            std::span<const std::byte> pool) {
  const auto done = std::find_if(ended.begin(), ended.end(),
                                 [&](const auto& one) { return one.ticket == batch.ticket; });
  REQUIRE(done != ended.end());
  for (std::size_t i = 0; i < done->checksums.size(); ++i) {
    if (done->checksums[i] == kNoChecksum) continue;
    CHECK(batch.copies[i].checksum);
    CHECK(done->checksums[i] ==
          PageChecksum::of(pool.subspan(batch.copies[i].pool_offset, page_bytes)));
  }
}

/// The pages of all groups lie one behind the other in each slot, and every byte of both memories
/// is compared: those of the pages, and those that no copy may touch.
inline void check_overlaid_layouts(LayoutsRig& rig, std::mt19937_64& random) {
  const OverlaidGroups groups(rig.engine, random);
  const auto layouts = groups.layouts();
  const std::uint64_t slot = slot_bytes_for(groups.page_bytes());
  const std::size_t slots =
      std::min<std::size_t>(rig.pool.size() / slot, groups.blocks() / layouts.size());
  REQUIRE(rig.device.attach(layouts, rig.pool, rig.sink));
  std::vector<std::byte> memory(LayoutsRig::kEngineBytes);
  for (std::byte& byte : rig.pool) byte = static_cast<std::byte>(random());
  std::vector<std::byte> pool(rig.pool.begin(), rig.pool.end());
  const auto scribble = [&] {
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
    rig.write(memory);
  };
  std::size_t batches = 0;
  for (const auto direction : {Device::Direction::kSave, Device::Direction::kLoad}) {
    scribble();
    std::vector<std::uint32_t> blocks(groups.blocks());  // Of one group each.
    std::iota(blocks.begin(), blocks.end(), 0U);
    std::shuffle(blocks.begin(), blocks.end(), random);
    std::vector<Device::Batch> given;
    std::uint64_t offset = 0;
    for (std::size_t group = 0; group < layouts.size(); ++group) {
      Device::Batch batch{.ticket = ++batches, .direction = direction, .copies = {}};
      batch.layout = group;
      for (std::size_t i = 0; i < slots; ++i) {
        const bool checksum = random() % 4 == 0;
        batch.copies.push_back({blocks[group * slots + i], i * slot + offset, checksum});
      }
      if (random() % 2 == 0) std::shuffle(batch.copies.begin(), batch.copies.end(), random);
      offset += layouts[group].page_bytes();
      given.push_back(std::move(batch));
    }
    std::shuffle(given.begin(), given.end(), random);
    for (const Device::Batch& batch : given) {
      model_batch(batch, layouts[batch.layout], rig.engine, memory, pool);
      REQUIRE(rig.device.submit(batch));
    }
    const std::vector<Device::Completion> ended = rig.wait_for(batches);
    for (const Device::Completion& done : ended) CHECK_FALSE(done.error);
    for (const Device::Batch& batch : given) {
      check_checksums(batch, layouts[batch.layout].page_bytes(), ended, pool);
    }
    CHECK(rig.read() == memory);
    CHECK(std::equal(pool.begin(), pool.end(), rig.pool.begin()));
  }
  rig.device.detach();
}

/// Batches that name no layout, or a block or a place that is beyond their own.
inline void check_bad_layouts(LayoutsRig& rig) {
  const auto layout = [&](std::uint64_t bytes, std::uint64_t blocks) {
    return PageLayout::create({{rig.engine, bytes, bytes}}, blocks).value();
  };
  const std::vector<PageLayout> layouts{layout(512, 16), layout(8192, 4)};
  const auto batch = [&](std::size_t index, std::uint32_t block, std::uint64_t offset) {
    Device::Batch one{.ticket = 7, .copies = {{block, offset}}};
    one.layout = index;
    return one;
  };
  const auto refused = [&](const Device::Batch& one) {
    const Result<void> submitted = rig.device.submit(one);
    REQUIRE_FALSE(submitted);
    CHECK(submitted.error().code == Errc::kInvalidArgument);
    return submitted.error().detail;
  };
  CHECK(rig.device.attach(std::span<const PageLayout>(), rig.pool, rig.sink).error().detail ==
        "attach: no layout was given");
  REQUIRE(rig.device.attach(layouts, rig.pool, rig.sink));

  CHECK(refused(batch(2, 0, 0)) == "batch 7: layout 2 of 2");
  CHECK(refused(batch(1, 4, 0)).find("block 4 of 4") == 0);
  CHECK(refused(batch(1, 0, rig.pool.size() - 512)).find("a page of 8192 bytes") !=
        std::string::npos);
  CHECK(rig.device.submit(batch(0, 15, rig.pool.size() - 512)));
  rig.wait_for(1);
  rig.device.detach();
}

}  // namespace pegaflow::testing
