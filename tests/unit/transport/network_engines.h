#pragma once
/// \file
/// Engines of several hosts in one process, each with a NetworkDevice.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/clock.h"
#include "base/os/unique_fd.h"
#include "harness/engine_memory.h"
#include "harness/pattern.h"
#include "tests/support/patience.h"
#include "tests/unit/transport/completions.h"
#include "transport/host/host_device.h"
#include "transport/network_device.h"
#include "transport/pool_peer.h"

namespace pegaflow::testing {

/// Memory that is mapped twice. Its owner writes through `alias` while fabrics read `memory`: a
/// race that the guards decide, and that ThreadSanitizer does not see at two addresses.
struct TwiceMapped {
  explicit TwiceMapped(std::size_t bytes) : fd(::memfd_create("blocks", MFD_CLOEXEC)) {
    REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
    memory = harness::Mapping::shared(fd.get(), bytes).value();
    alias = harness::Mapping::shared(fd.get(), bytes).value();
  }
  UniqueFd fd;
  harness::Mapping memory;
  harness::Mapping alias;
};

/// Places an engine's blocks in its memory.
using Place = std::function<PageLayout(std::span<std::byte>)>;

/// Block by block, segment by segment, or in pairs that are interleaved, as K and V in one tensor.
/// `gap` bytes behind each segment belong to no block.
enum class Placement : std::uint8_t { kByBlock, kBySegment, kInPairs };

/// Segments of these sizes for `blocks` blocks, or for as many as fit.
inline PageLayout place(std::span<std::byte> memory, std::span<const std::uint64_t> sizes,
                        std::uint64_t blocks, Placement placement, std::uint64_t gap) {
  std::uint64_t page = 0;
  for (const std::uint64_t size : sizes) page += size + gap;
  blocks = std::min<std::uint64_t>(blocks, memory.size() / page);
  std::size_t group = 1;
  if (placement == Placement::kByBlock) group = sizes.size();
  if (placement == Placement::kInPairs) group = 2;
  std::vector<Segment> segments;
  std::byte* at = memory.data();
  for (std::size_t first = 0; first < sizes.size(); first += group) {
    const std::size_t end = std::min(first + group, sizes.size());
    std::uint64_t stride = 0;
    for (std::size_t i = first; i < end; ++i) stride += sizes[i] + gap;
    std::byte* segment = at;
    for (std::size_t i = first; i < end; ++i) {
      segments.push_back({segment, stride, sizes[i]});
      segment += sizes[i] + gap;
    }
    at += stride * blocks;
  }
  return PageLayout::create(std::move(segments), blocks).value();
}

/// Blocks of four segments, K and V of two layers.
inline Place four_segments(std::uint64_t segment_bytes, std::uint64_t blocks) {
  return [=](std::span<std::byte> memory) {
    const std::vector<std::uint64_t> sizes(4, segment_bytes);
    return place(memory, sizes, blocks, Placement::kInPairs, 0);
  };
}

/// An engine with its own memory, guards and fabric.
struct NetworkEngine {
  NetworkEngine(const NetworkDevice::MakeFabric& make, const Place& placed,
                std::size_t bytes = 1 << 20, std::size_t guard_count = 64,
                const NetworkDevice::Options& options = {.patience = 2 * kHang})
      : blocks(bytes),
        guards(guard_count * sizeof(std::uint64_t)),
        layout(placed(blocks.memory.bytes())),
        pool(layout.page_bytes() * 4) {
    static const SteadyClock clock;
    auto made = NetworkDevice::create(HostDevice::create({}).value(), layout, make, clock, options);
    if (!made) FAIL(to_string(made.error()));
    device = std::move(*made);
    REQUIRE(device->attach(layout, pool, completions.sink()));
  }

  [[nodiscard]] PeerMemory shared() { return device->share(layout, guards.memory.bytes()).value(); }
  [[nodiscard]] std::span<std::byte> bytes() const { return blocks.memory.bytes(); }
  /// A guard, by the address at which its owner changes it.
  [[nodiscard]] std::atomic_ref<std::uint64_t> guard(std::size_t number) const {
    return std::atomic_ref<std::uint64_t>(
        reinterpret_cast<std::uint64_t*>(guards.alias.bytes().data())[number]);
  }

  /// The bytes of a segment of a block, through `mapping`.
  [[nodiscard]] std::span<std::byte> piece(const harness::Mapping& mapping, std::size_t segment,
                                           std::uint64_t block) const {
    const Segment& where = layout.segments()[segment];
    const auto offset = static_cast<std::size_t>(where.base - blocks.memory.bytes().data());
    return mapping.bytes().subspan(offset + block * where.block_stride_bytes, where.size_bytes);
  }
  /// Writes the pattern of `seed` to a block, as its owner does.
  void write(std::uint64_t block, std::uint64_t seed) const {
    for (std::size_t i = 0; i < layout.segments().size(); ++i) {
      harness::write_pattern(piece(blocks.alias, i, block), harness::pattern_seed(seed, i));
    }
  }
  [[nodiscard]] bool holds(std::uint64_t block, std::uint64_t seed) const {
    for (std::size_t i = 0; i < layout.segments().size(); ++i) {
      if (!harness::is_pattern(piece(blocks.memory, i, block), harness::pattern_seed(seed, i))) {
        return false;
      }
    }
    return true;
  }

  TwiceMapped blocks;
  TwiceMapped guards;
  PageLayout layout;
  std::vector<std::byte> pool;
  Completions completions;
  std::unique_ptr<NetworkDevice> device;
};

inline constexpr std::uint64_t kOtherHost = 7;  ///< The name of the peer.

inline Device::Batch load(std::uint64_t ticket, std::vector<Device::Copy> copies,
                          std::vector<std::uint32_t> guards = {}) {
  Device::Batch batch{
      .ticket = ticket, .direction = Device::Direction::kLoad, .copies = std::move(copies)};
  batch.peer = kOtherHost;
  batch.guards = std::move(guards);
  return batch;
}

/// Each block of the peer into the block with the same number.
inline Device::Batch load_all(std::uint64_t ticket, const PageLayout& layout,
                              std::vector<std::uint32_t> guards = {}) {
  std::vector<Device::Copy> copies;
  for (std::uint32_t i = 0; i < layout.block_count(); ++i) copies.push_back({i, i});
  return load(ticket, std::move(copies), std::move(guards));
}

/// A time that passes without a clock.
inline void spin(std::size_t rounds) {
  for (; rounds > 0; --rounds) asm volatile("" ::: "memory");
}

inline Error error_of(const Result<void>& result) {
  REQUIRE_FALSE(result);
  return result.error();
}

}  // namespace pegaflow::testing
