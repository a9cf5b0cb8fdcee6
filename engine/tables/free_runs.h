#pragma once
/// \file
/// Which units of one NUMA node's part of the pool are free, and where runs of them begin.

#include <cstdint>
#include <optional>
#include <vector>

namespace pegaflow::engine {

/// Finds a run of free units without a walk over all of them: a binary tree keeps, for each
/// aligned group of units, its longest free run and those at its two ends.
///
/// Thread-bound. A search visits at most one tree node per level; take() and give() visit the nodes
/// above the units that change. 24 to 48 bytes per unit.
class FreeRuns {
 public:
  /// All units are free.
  explicit FreeRuns(std::uint32_t units);

  /// Takes, or gives back, `count` units from `first` on; before, all of them are free, or all are
  /// taken.
  void take(std::uint32_t first, std::uint32_t count) { set(first, count, 0); }
  void give(std::uint32_t first, std::uint32_t count) { set(first, count, 1); }

  [[nodiscard]] bool is_free(std::uint32_t unit) const noexcept {
    return nodes_[leaves_ + unit].longest != 0;
  }
  /// The length of the longest run, 0 when no unit is free.
  [[nodiscard]] std::uint32_t longest() const noexcept { return nodes_[1].longest; }
  /// The first unit of the lowest, or the highest, `count` consecutive free units; `count` is 1 or
  /// more.
  [[nodiscard]] std::optional<std::uint32_t> lowest(std::uint32_t count) const {
    return find(count, End::kLowest);
  }
  [[nodiscard]] std::optional<std::uint32_t> highest(std::uint32_t count) const {
    return find(count, End::kHighest);
  }

  /// The count of tree nodes that searches and changes visited since the start: their cost, without
  /// a clock.
  [[nodiscard]] std::uint64_t visited() const noexcept { return visited_; }
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept { return nodes_.size() * sizeof(Node); }

 private:
  /// The free units of a group: its longest run, the run at its beginning, and the run at its end.
  struct Node {
    std::uint32_t longest = 0;
    std::uint32_t prefix = 0;
    std::uint32_t suffix = 0;
  };
  enum class End : bool { kLowest, kHighest };
  /// In each group the search prefers the half at `end`, then the run across the middle, then the
  /// other half.
  [[nodiscard]] std::optional<std::uint32_t> find(std::uint32_t count, End end) const;
  void set(std::uint32_t first, std::uint32_t count, std::uint32_t is_free);
  void combine(std::uint32_t node, std::uint32_t half);

  std::uint32_t leaves_;     ///< A power of two; those after the last unit are never free.
  std::vector<Node> nodes_;  ///< The children of node n are 2 n and 2 n + 1; 1 is the root.
  mutable std::uint64_t visited_ = 0;
};

}  // namespace pegaflow::engine
