#pragma once
/// \file
/// The order in which several routers choose for requests of one instant.

#include <cstdint>
#include <span>
#include <vector>

#include "index/placement/record.h"

namespace pegaflow::index {

/// Requests that reach several routers at one instant would all be sent to the same idle engine,
/// because no router has the other routers' records yet. So the routers have an order that they all
/// know, and a choice waits until each router before this one has placed a request of that instant.
/// A router cannot know whether the others have a request, so the wait has a limit.
///
/// Thread-bound; times are seconds on one monotonic scale. All memory is allocated at the start.
class Turns {
 public:
  /// The longest wait for one router: a record takes 0.1 to 0.5 ms on machines that are not busy.
  static constexpr double kEach = 0.001;
  /// The longest wait, as a share of the time that the prompt is computed.
  static constexpr double kShare = 0.05;
  /// Requests that were placed so long before a request arrived belong to its instant.
  static constexpr double kInstant = 0.002;

  explicit Turns(std::uint32_t max_routers);

  /// Replaces the routers before this one. Those at or above max_routers, and 0, are left out.
  void set_before(std::span<const RouterId> routers);
  /// A router's placement arrived. Unknown routers are no error.
  void placed(RouterId router, double now);

  /// Whether each router before this one has placed a request at the instant `arrived`, or later.
  [[nodiscard]] bool is_next(double arrived) const;
  /// Seconds for which a choice waits at most, for a prompt that takes so long to compute.
  [[nodiscard]] double limit(double prefill_seconds) const;

 private:
  std::vector<RouterId> before_;
  std::vector<double> placed_;  // By router: when its newest placement arrived.
};

}  // namespace pegaflow::index
