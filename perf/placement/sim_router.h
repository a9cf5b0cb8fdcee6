#pragma once
/// \file
/// One simulated router: the real index, placement and expected blocks.

#include <cstdint>
#include <memory>
#include <span>

#include "index/key.h"
#include "index/placement/placement.h"
#include "perf/placement/sim_policy.h"

namespace pegaflow::perf {

/// Simulated time as the router's.
inline TimePoint time_point(double seconds) {
  return TimePoint(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
}

/// A router as users run it, but for its sockets: events come as lists of keys, and time is given.
/// Engine and node i of its placement are node i of the simulation. Thread-bound.
class SimRouter {
 public:
  /// Errors: those of the index and of placement.
  static Result<std::unique_ptr<SimRouter>> create(std::size_t nodes, const SimHardware& hardware,
                                                   const index::Placement::Options& options);

  /// Seconds for which choose() should still wait; see Turns.
  double turn(const PlaceRequest& request, double now);
  struct Choice {
    SimChoice choice;
    index::PlacementRecord record;
  };
  Choice choose(std::uint64_t id, const PlaceRequest& request, double now);
  void first_token(std::uint64_t id, const PlaceRequest& request, std::uint32_t node,
                   const Served& served);

  /// Events of an engine or a node.
  void stored(std::uint32_t node, bool in_pool, std::span<const index::Key> keys);
  void erased(std::uint32_t node, bool in_pool, std::span<const index::Key> keys);
  /// A placement of another router.
  void apply(const index::PlacementRecord& record, const PlaceRequest& request, double now);

  [[nodiscard]] index::Placement& placement() { return *placement_; }
  ~SimRouter();
  SimRouter(const SimRouter&) = delete;
  SimRouter& operator=(const SimRouter&) = delete;

 private:
  struct State;
  /// Reads the candidates and sources of the request.
  index::PlacementRequest look_up(const PlaceRequest& request, double now);
  SimRouter(std::unique_ptr<index::Placement> placement, std::unique_ptr<State> state);

  std::unique_ptr<index::Placement> placement_;
  std::unique_ptr<State> state_;
};

}  // namespace pegaflow::perf
