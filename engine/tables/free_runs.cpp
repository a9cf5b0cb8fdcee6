#include "engine/tables/free_runs.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"

namespace pegaflow::engine {

FreeRuns::FreeRuns(std::uint32_t units)
    : leaves_(std::bit_ceil(std::max(units, std::uint32_t{1}))), nodes_(std::size_t{2} * leaves_) {
  if (units != 0) set(0, units, 1);
  visited_ = 0;
}

void FreeRuns::combine(std::uint32_t node, std::uint32_t half) {
  const Node& left = nodes_[2 * node];
  const Node& right = nodes_[2 * node + 1];
  nodes_[node] = {
      .longest = std::max({left.longest, right.longest, left.suffix + right.prefix}),
      .prefix = left.prefix == half ? half + right.prefix : left.prefix,
      .suffix = right.suffix == half ? half + left.suffix : right.suffix,
  };
}

void FreeRuns::set(std::uint32_t first, std::uint32_t count, std::uint32_t is_free) {
  std::uint32_t begin = leaves_ + first;
  std::uint32_t last = begin + count - 1;
  PEGA_ASSERT(count != 0 && last < nodes_.size(), "{} units from {} on", count, first);
  for (std::uint32_t leaf = begin; leaf <= last; ++leaf) {
    PEGA_ASSERT(nodes_[leaf].longest != is_free, "unit {} is {} already", leaf - leaves_,
                is_free != 0 ? "free" : "taken");
    nodes_[leaf] = {.longest = is_free, .prefix = is_free, .suffix = is_free};
  }
  visited_ += count;
  for (std::uint32_t half = 1; begin > 1; half *= 2) {
    begin /= 2;
    last /= 2;
    for (std::uint32_t node = begin; node <= last; ++node) combine(node, half);
    visited_ += last - begin + 1;
  }
}

std::optional<std::uint32_t> FreeRuns::find(std::uint32_t count, End end) const {
  ++visited_;
  if (longest() < count) return std::nullopt;
  const std::uint32_t near = end == End::kLowest ? 0 : 1;  // Index among the two children.
  std::uint32_t node = 1;
  std::uint32_t begin = 0;
  for (std::uint32_t half = leaves_ / 2; half != 0; half /= 2) {
    ++visited_;
    const Node& left = nodes_[2 * node];
    const Node& right = nodes_[2 * node + 1];
    std::uint32_t child = near;
    if (nodes_[2 * node + near].longest < count) {
      if (left.suffix + right.prefix >= count) {
        const std::uint32_t middle = begin + half;
        return end == End::kLowest ? middle - left.suffix : middle + right.prefix - count;
      }
      child = 1 - near;
    }
    node = 2 * node + child;
    begin += child * half;
  }
  return begin;
}

}  // namespace pegaflow::engine
