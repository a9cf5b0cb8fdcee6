#pragma once
/// \file
/// The NUMA nodes that a pool lies on: requested before its pages are touched, verified afterwards.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/os/numa.h"
#include "engine/types/numa_ranges.h"

namespace pegaflow::engine {

/// The policies that an operator can choose from.
enum class NumaPolicy : std::uint8_t {
  kAuto,        ///< Each NUMA node has its part of the pool, and pages lie near their rank.
  kInterleave,  ///< Page by page over all NUMA nodes: the same distance for every rank.
  kOff,         ///< Where the kernel places it.
};

/// Errors: kInvalidArgument that lists the names.
Result<NumaPolicy> numa_policy(std::string_view name);
std::string_view to_string(NumaPolicy policy) noexcept;

/// The result of placing a pool.
struct PoolPlacement {
  NumaPolicy policy =
      NumaPolicy::kOff;  ///< The policy in effect; kOff where there is only one NUMA node.
  /// The NUMA nodes of the pool; at most kMaxNumaNodes with kAuto. Empty with kOff.
  std::vector<NumaNode> numa_nodes;
  /// With kAuto the part of each NUMA node, in their order.
  std::vector<NumaRange> ranges;
  std::string refused;  ///< Why the requested policy is not in effect; empty when it is.
  /// With kAuto: the share of the sampled pages that lie on their intended NUMA node. A NUMA node
  /// that is full leaves its part to others. No value where the kernel does not report it.
  std::optional<double> in_place;
};

/// Requests NUMA nodes for the pages of `pool`, none of which is present yet. A refusal (a
/// container's filter of system calls) is no error: the pool then lies anywhere.
///
/// A NUMA node is preferred, not required: a pool must not fail because one is full, and an
/// allocation that is bound to one NUMA node wakes the OOM killer.
PoolPlacement place_pool(std::span<std::byte> pool, std::uint64_t memory_page_bytes,
                         NumaPolicy policy, std::vector<NumaNode> numa_nodes);

/// Samples the NUMA nodes of each part's pages, once they are present.
void verify_placement(std::span<std::byte> pool, PoolPlacement& placement);

/// For logs: `auto, NUMA nodes 0 1`, or why it is off.
std::string to_string(const PoolPlacement& placement);

}  // namespace pegaflow::engine
