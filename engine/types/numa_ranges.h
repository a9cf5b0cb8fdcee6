#pragma once
/// \file
/// How a pool is divided into units and among NUMA nodes.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "base/page_layout.h"

namespace pegaflow::engine {

/// Extents consist of units of 64 MiB: as large as a block of any engine, and still 1/480 of the
/// default pool. A small pool has smaller units, the largest power of two of which it holds 64, so
/// that engines with different pages share it in steps of at most 1/64.
constexpr std::uint64_t unit_bytes_for(std::uint64_t pool_bytes) noexcept {
  constexpr std::uint64_t kLargest = std::uint64_t{64} << 20;
  constexpr std::uint64_t kUnits = 64;
  return std::clamp(std::bit_floor(pool_bytes / kUnits), kSlotAlignment, kLargest);
}

/// The bytes of the pool that lie on one NUMA node.
struct NumaRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// Divides the pool among `numa_nodes` NUMA nodes in equal parts, which begin at whole units and at
/// whole pages of memory. A pool too small for that lies on one NUMA node.
inline std::vector<NumaRange> numa_ranges(std::uint64_t pool_bytes, std::uint32_t numa_nodes,
                                          std::uint64_t memory_page_bytes = kSlotAlignment) {
  const std::uint64_t step = std::max(unit_bytes_for(pool_bytes), memory_page_bytes);
  const std::uint64_t each = pool_bytes / std::max(numa_nodes, std::uint32_t{1}) / step * step;
  if (numa_nodes <= 1 || each == 0) return {{.begin = 0, .end = pool_bytes}};
  std::vector<NumaRange> ranges(numa_nodes);
  for (std::uint32_t i = 0; i < numa_nodes; ++i) {
    ranges[i] = {.begin = i * each, .end = i + 1 == numa_nodes ? pool_bytes : (i + 1) * each};
  }
  return ranges;
}

}  // namespace pegaflow::engine
