#pragma once
/// \file
/// The NUMA nodes of this machine, their cores, and the distances between them.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace pegaflow {

/// Parses a list in the kernel's format: `0-2,8` is 0, 1, 2 and 8; an empty line is an empty list.
/// Errors: kInvalidArgument for anything else, and for numbers above 65,535.
Result<std::vector<std::uint32_t>> parse_number_list(std::string_view text);

/// One NUMA node, as sysfs describes it.
struct NumaNode {
  std::uint32_t number = 0;
  std::vector<std::uint32_t> cores;  ///< Online cores, rising.
  bool has_memory = false;
  bool is_allowed = true;  ///< This process may allocate memory on it (its cpuset).
  /// The distance to each NUMA node of the machine in their order; 10 is the node itself. Empty if
  /// the kernel does not report it.
  std::vector<std::uint32_t> distances;

  bool operator==(const NumaNode&) const = default;
};

/// The NUMA nodes of a machine, read once. Immutable.
class NumaTopology {
 public:
  /// The kernel's files; tests use recorded trees of other machines.
  struct Sources {
    std::filesystem::path sysfs = "/sys";
    std::filesystem::path process_status = "/proc/self/status";
  };

  /// Ignores files that are missing or cannot be parsed: without sysfs a machine has no NUMA nodes,
  /// which callers treat like a machine with one.
  static NumaTopology read(const Sources& sources);
  static NumaTopology read() { return read(Sources()); }

  /// In rising order of their numbers, which need not be without gaps.
  [[nodiscard]] std::span<const NumaNode> nodes() const noexcept { return nodes_; }

  /// The NUMA nodes that ordinary memory comes from: those with memory and cores that this process
  /// may use. Memory without cores belongs to a device (a GPU, CXL) and is not used.
  [[nodiscard]] std::vector<NumaNode> memory_nodes() const;

  /// The NUMA node that all these cores belong to; no value if they belong to several or to none.
  [[nodiscard]] std::optional<std::uint32_t> node_of(std::span<const std::uint32_t> cores) const;

  /// The index in `among` of the NUMA node nearest to `node`; the first of several equally near
  /// ones. No value for a node that the machine does not have, and if `among` is empty.
  [[nodiscard]] std::optional<std::size_t> nearest(std::uint32_t node,
                                                   std::span<const NumaNode> among) const;

 private:
  std::vector<NumaNode> nodes_;
};

/// The cores that the calling thread may run on; empty if the kernel does not report them.
std::vector<std::uint32_t> allowed_cores();

/// Binds the calling thread to those of `cores` on which it may run. False, and no change, if it
/// may run on none of them.
bool keep_thread_on(std::span<const std::uint32_t> cores);

}  // namespace pegaflow
