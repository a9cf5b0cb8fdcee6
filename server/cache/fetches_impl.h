#pragma once
/// \file
/// The claims and the waiting opens of Fetches. Only for its own source files.

#include <cstddef>
#include <optional>

#include "server/cache/fetches.h"

namespace pegaflow::server {

/// A claim while it is extended, and the request for its blocks.
struct Fetches::Plan : cluster::Source::Request {
  Id128 connection;
  Id128 token;
  engine::SpaceId generation{};  ///< The namespace generation of the claim.
  std::size_t ready = 0;         ///< Keys whose blocks were local.
  std::size_t claimed = 0;       ///< Keys that the claim has now.
  std::size_t runs = 0;          ///< Owners that delivered a part, one after the other.
  cluster::ComputeTime compute;  ///< Time to compute the blocks that are fetched, if known.
  cluster::Arrival arrival;      ///< Predicted for the claimed keys behind `ready`.
};

/// A worker that waits for blocks.
struct Fetches::Opening {
  Id128 connection;
  Id128 token;
  std::size_t first = 0;
  std::size_t count = 0;
  engine::PinId pin{};
  TimePoint deadline;
  /// End of the load's use; max: unknown; no value: the load is not judged.
  std::optional<TimePoint> worth_until{};
  Duration computing{};  ///< Time to compute the blocks; 0: unknown.
};

}  // namespace pegaflow::server
