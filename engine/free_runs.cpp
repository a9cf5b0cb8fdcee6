#include "engine/free_runs.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"

namespace pegaflow {

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

std::optional<std::uint32_t> FreeRuns::lowest(std::uint32_t count) const {
  ++visited_;
  if (longest() < count) return std::nullopt;
  std::uint32_t node = 1;
  std::uint32_t begin = 0;
  for (std::uint32_t half = leaves_ / 2; half != 0; half /= 2) {
    ++visited_;
    const Node& left = nodes_[2 * node];
    if (left.longest >= count) {
      node = 2 * node;
    } else if (left.suffix + nodes_[2 * node + 1].prefix >= count) {
      return begin + half - left.suffix;
    } else {
      node = 2 * node + 1;
      begin += half;
    }
  }
  return begin;
}

std::optional<std::uint32_t> FreeRuns::highest(std::uint32_t count) const {
  ++visited_;
  if (longest() < count) return std::nullopt;
  std::uint32_t node = 1;
  std::uint32_t begin = 0;
  for (std::uint32_t half = leaves_ / 2; half != 0; half /= 2) {
    ++visited_;
    const Node& right = nodes_[2 * node + 1];
    if (right.longest >= count) {
      node = 2 * node + 1;
      begin += half;
    } else if (nodes_[2 * node].suffix + right.prefix >= count) {
      return begin + half + right.prefix - count;
    } else {
      node = 2 * node;
    }
  }
  return begin;
}

}  // namespace pegaflow
