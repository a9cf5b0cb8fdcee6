#pragma once
/// \file
/// The pools of all nodes of a simulated cluster, and the view of all of them.

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <unordered_map>
#include <vector>

namespace pegaflow::directory {

/// Pools with exact LRU, in units of 32 blocks: their last-used order is what decides about
/// evictions, and units keep 5 million blocks a node in memory.
class Pools {
 public:
  /// `changed` receives each unit that a node has now, or no longer, and whether it is among the
  /// first two of its prompts, the place included.
  using Changed =
      std::function<void(std::size_t node, std::uint64_t unit, std::uint8_t place, bool is_there)>;
  Pools(std::size_t nodes, std::size_t units_each, Changed changed)
      : units_each_(units_each), changed_(std::move(changed)), nodes_(nodes) {}

  /// The node uses a prompt: it has all of it afterwards, the end used first.
  void use(std::size_t node, std::span<const std::uint64_t> units);
  /// All units of a node are gone, without a word.
  void clear(std::size_t node);
  [[nodiscard]] bool has(std::size_t node, std::uint64_t unit) const {
    return nodes_[node].places.contains(unit);
  }
  /// How many of the units from the first on the node has.
  [[nodiscard]] std::size_t prefix(std::size_t node, std::span<const std::uint64_t> units) const;
  /// The longest such prefix of any other node.
  [[nodiscard]] std::size_t longest_elsewhere(std::size_t node,
                                              std::span<const std::uint64_t> units) const;
  [[nodiscard]] std::size_t size(std::size_t node) const { return nodes_[node].places.size(); }
  [[nodiscard]] bool is_full(std::size_t node) const { return size(node) >= units_each_; }
  [[nodiscard]] std::uint64_t inserted() const noexcept { return inserted_; }

 private:
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
  struct Slot {
    std::uint64_t unit = 0;
    std::uint32_t before = kNone;  ///< Used later.
    std::uint32_t after = kNone;
    std::uint8_t place = 0;
  };
  struct Node {
    std::vector<Slot> slots;
    std::unordered_map<std::uint64_t, std::uint32_t> places;
    std::uint32_t first = kNone;  ///< Used last.
    std::uint32_t last = kNone;
  };
  void touch(std::size_t node, std::uint64_t unit, std::uint8_t place);
  void unlink(Node& node, std::uint32_t slot);
  void link_first(Node& node, std::uint32_t slot);
  void forget_holder(std::size_t node, std::uint64_t unit);

  const std::size_t units_each_;
  const Changed changed_;
  std::vector<Node> nodes_;
  std::unordered_map<std::uint64_t, std::vector<std::uint16_t>> holders_;  ///< Sorted.
  std::uint64_t inserted_ = 0;
};

}  // namespace pegaflow::directory
