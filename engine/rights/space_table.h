#pragma once
/// \file
/// The namespace generations.

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_map>

#include "base/assert.h"
#include "engine/rights/rows.h"

namespace pegaflow::engine {

/// Owns the generations. One keeps its address until it is removed: rows of other tables point to
/// it. Thread-bound.
class SpaceTable {
 public:
  SpaceId add(ShapeId shape, std::optional<SpaceId> former) {
    PEGA_ASSERT(next_ != std::numeric_limits<std::uint32_t>::max(),
                "namespace generations ran out");
    const SpaceId id{next_++};
    Space& space = spaces_[id];
    space.id = id;
    space.shape = shape;
    space.former = former;
    return id;
  }
  /// Adds a generation of a former process under its id. Returns false if that is in use.
  bool restore(SpaceId id, ShapeId shape) {
    const auto number = static_cast<std::uint32_t>(id);
    if (number == 0 || number == std::numeric_limits<std::uint32_t>::max()) return false;
    const auto [entry, is_new] = spaces_.try_emplace(id);
    if (!is_new) return false;
    entry->second.id = id;
    entry->second.shape = shape;
    next_ = std::max(next_, number + 1);
    return true;
  }
  /// From now on it is not live. It stays until its claims and reservations have ended.
  void retire(Space& space) { space.is_retired = true; }
  /// Its lists are empty.
  void remove(SpaceId id) { spaces_.erase(id); }

  /// Null if it is unknown or retired.
  [[nodiscard]] Space* live(SpaceId id) {
    const auto found = spaces_.find(id);
    return found != spaces_.end() && !found->second.is_retired ? &found->second : nullptr;
  }
  [[nodiscard]] bool is_live(SpaceId id) const {
    const auto found = spaces_.find(id);
    return found != spaces_.end() && !found->second.is_retired;
  }
  /// Live or retired, and not removed.
  [[nodiscard]] const Space& operator[](SpaceId id) const { return spaces_.at(id); }

 private:
  std::uint32_t next_ = 1;
  std::unordered_map<SpaceId, Space> spaces_;  ///< Few, in a map whose elements do not move.
};

}  // namespace pegaflow::engine
