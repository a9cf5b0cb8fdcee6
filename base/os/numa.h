#pragma once
/// \file
/// The nodes of memory (NUMA) of this machine: which there are, with which cores, and how far
/// apart.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace pegaflow {

/// A list as the kernel writes it: `0-2,8` is 0, 1, 2 and 8; an empty line is an empty list.
/// Errors: kInvalidArgument for anything else, and for numbers above 65,535.
Result<std::vector<std::uint32_t>> parse_number_list(std::string_view text);

/// One node, as sysfs has it.
struct NumaNode {
  std::uint32_t number = 0;
  std::vector<std::uint32_t> cores;  ///< That are online; rising.
  bool has_memory = false;
  bool is_allowed = true;  ///< This process may have memory of it (its cpuset).
  /// To each node of the machine in their order, 10 is itself. Empty where the kernel does not say.
  std::vector<std::uint32_t> distances;

  bool operator==(const NumaNode&) const = default;
};

/// The nodes of a machine, read once. Immutable.
class NumaTopology {
 public:
  /// Where the kernel says it; other places are recorded trees of other machines, in tests.
  struct Sources {
    std::filesystem::path sysfs = "/sys";
    std::filesystem::path process_status = "/proc/self/status";
  };

  /// What cannot be read or understood counts as not there: without sysfs a machine has no nodes,
  /// which is the same as one to everybody who asks.
  static NumaTopology read(const Sources& sources);
  static NumaTopology read() { return read(Sources()); }

  /// In rising order of their numbers, which need not be without gaps.
  [[nodiscard]] std::span<const NumaNode> nodes() const noexcept { return nodes_; }

  /// The nodes that ordinary memory comes from: those with memory and cores that this process may
  /// have. Memory without cores is something else (a GPU's, CXL's), and is left alone.
  [[nodiscard]] std::vector<NumaNode> memory_nodes() const;

  /// The node that all these cores belong to; none when they are of several, or of none.
  [[nodiscard]] std::optional<std::uint32_t> node_of(std::span<const std::uint32_t> cores) const;

  /// Which of `among` is nearest to `node`, as its index there; the first of several equally near.
  /// None for a node that the machine does not have, and when `among` is empty.
  [[nodiscard]] std::optional<std::size_t> nearest(std::uint32_t node,
                                                   std::span<const NumaNode> among) const;

 private:
  std::vector<NumaNode> nodes_;
};

/// The cores that the calling thread may run on; empty when the kernel does not say.
std::vector<std::uint32_t> allowed_cores();

/// Keeps the calling thread to `cores`, as far as it may run there at all. False, and no change,
/// when it may not.
bool keep_thread_on(std::span<const std::uint32_t> cores);

}  // namespace pegaflow
