#pragma once
/// \file
/// On which nodes of memory (NUMA) a pool lies: asked for before it is touched, looked at after.

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

/// What an operator can ask for.
enum class NumaPolicy : std::uint8_t {
  kAuto,  ///< With several nodes each has its part of the pool, and pages lie near their rank.
  kInterleave,  ///< Page by page over all nodes: nobody is near, and nobody far.
  kOff,         ///< Where the kernel puts it.
};

/// Errors: kInvalidArgument that lists the names.
Result<NumaPolicy> numa_policy(std::string_view name);
std::string_view to_string(NumaPolicy policy) noexcept;

/// What came of it.
struct PoolPlacement {
  NumaPolicy policy = NumaPolicy::kOff;  ///< That holds; kOff where one node is all there is.
  /// That the pool lies on; at most kMaxNumaNodes with kAuto. Empty with kOff.
  std::vector<NumaNode> numa_nodes;
  /// With kAuto the part of each node, in their order.
  std::vector<NumaRange> ranges;
  std::string refused;  ///< Why it is not what was asked for; empty when it is.
  /// With kAuto: of the pages that were looked at, how many lie on the node that they were meant
  /// for. A node that is full gives its part to others. No value where the kernel does not say.
  std::optional<double> in_place;
};

/// Tells the kernel where the pages of `pool`, none of which is there yet, shall come from. A
/// refusal (a container's filter of system calls) is no error: the pool then lies anywhere.
///
/// A node is preferred, not insisted on: one that is full is no reason to be without a pool, and an
/// allocation that may come from nowhere else wakes the OOM killer.
PoolPlacement place_pool(std::span<std::byte> pool, std::uint64_t memory_page_bytes,
                         NumaPolicy policy, std::vector<NumaNode> numa_nodes);

/// Looks where some pages of each part are, now that they are there.
void verify_placement(std::span<std::byte> pool, PoolPlacement& placement);

/// For logs: `auto, nodes 0 1`, or why it is off.
std::string to_string(const PoolPlacement& placement);

}  // namespace pegaflow::engine
