#pragma once
/// \file
/// The order in which several routers choose for requests of one instant.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/placement/record.h"

namespace pegaflow::index {

/// Requests that reach several routers at one instant would all be sent to the same idle engine,
/// because no router has the other routers' records yet. So the routers take turns, in an order
/// that they all know: a router's first choice for an instant waits until each router before it has
/// placed one request, its second one until all the others have placed one and those before it two,
/// and so on. A router cannot know how many requests the others have, so the wait has a limit.
///
/// Thread-bound; times are seconds on one monotonic scale. All memory is allocated at the start.
class Turns {
 public:
  /// The wait for one router, since another one has placed a request: a record takes 0.1 to 0.5 ms
  /// on machines that are not busy.
  static constexpr double kFirst = 0.002;
  /// The time that each further router adds to it. Without it, those behind a router that has no
  /// request would all choose at one time.
  static constexpr double kFurther = 0.001;
  /// The longest wait for each of the other routers, however many requests they place meanwhile.
  static constexpr double kEach = 0.004;
  /// The longest wait, as a share of the time that the prompt is computed.
  static constexpr double kShare = 0.05;
  /// Requests that were placed so long before a request arrived belong to its instant.
  static constexpr double kInstant = 0.002;
  /// Placements of one router in an instant; further ones are not told apart.
  static constexpr std::size_t kCounted = 16;

  explicit Turns(std::uint32_t max_routers);

  /// Replaces the routers that choose before this one, and those after it. Those at or above
  /// max_routers, and 0, are left out.
  void set_others(std::span<const RouterId> before, std::span<const RouterId> after);
  /// A router's placement arrived, or this one, 0, has placed a request. Unknown routers are no
  /// error.
  void placed(RouterId router, double now);

  /// Whether it is this router's turn to place a request that arrived at this time.
  [[nodiscard]] bool is_next(double arrived) const { return missing(arrived) == 0; }
  /// The time until which its choice waits at most, if nothing is placed meanwhile. `limit` is that
  /// of the request, in seconds: see limit(). The time of arrival when it is this router's turn.
  [[nodiscard]] double end(double arrived, double limit) const;
  /// Seconds for which a choice waits at most, for a prompt that takes so long to compute.
  [[nodiscard]] double limit(double prefill_seconds) const;

 private:
  /// The newest placements of one router, the oldest of which is replaced next.
  struct Newest {
    std::array<double, kCounted> times{};
    std::size_t next = 0;
  };

  /// Placements of a router at the instant `arrived`, or later.
  [[nodiscard]] std::size_t count(RouterId router, double arrived) const;
  /// Routers that have to place a request before this one does.
  [[nodiscard]] std::size_t missing(double arrived) const;
  void take(std::span<const RouterId> routers, std::vector<RouterId>& kept) const;

  std::vector<RouterId> before_;
  std::vector<RouterId> after_;
  std::vector<Newest> newest_;  // By router.
  double last_placed_;
};

}  // namespace pegaflow::index
