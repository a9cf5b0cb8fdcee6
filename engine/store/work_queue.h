#pragma once
/// \file
/// What is still to be given back, in the order in which it ended.

#include <cstdint>
#include <deque>
#include <variant>

#include "engine/tables/frame_list.h"
#include "engine/types/ids.h"
#include "engine/types/shape.h"

namespace pegaflow::engine {

/// Blocks of a claim or pin that ended; given back from the last one on, so that the end of a chain
/// is the first to be evicted.
struct GiveBackWork {
  FrameList blocks;
};

/// Frames of a job that nobody writes any more, from the last one on.
struct FreeJobWork {
  std::uint32_t job = 0;
};

/// Claims, reservations and, once its process is gone, pins of a holder that left. Pins of a few
/// blocks are given back in the same step.
struct LeaveWork {
  HolderId holder{};
};

/// Claims and reservations of a retired space.
struct RetireWork {
  SpaceId space{};
};

/// Looks at every frame for blocks at rest whose space is retired. One is enough for all spaces.
struct DeadSweepWork {
  FrameIndex next = 0;
  bool again = false;  ///< A space was retired after it had begun.
};

/// Looks at every frame for blocks at rest.
struct CleanupWork {
  FrameIndex next = 0;
};

/// Evicts what is in an extent that another shape is to have.
struct LeavingWork {
  std::uint32_t extent = 0;
  std::uint64_t serial = 0;  ///< Of the extent: it may have gone by itself.
  ShapeId for_shape{};
  std::uint32_t next = 0;
};

/// Has the memory of a shape's tables come, page by page: thousands of page faults in the calls
/// that use it first, or in the one that makes them, would stall the loop.
struct TouchWork {
  ShapeId shape{};
  std::size_t next = 0;
};

/// Gives the memory of an unused shape's tables back, for the same reason in slices.
struct ForgetShapeWork {
  ShapeId shape{};
  std::size_t next = 0;
};

using Work = std::variant<GiveBackWork, FreeJobWork, LeaveWork, RetireWork, DeadSweepWork,
                          CleanupWork, LeavingWork, TouchWork, ForgetShapeWork>;

/// First in, first out. What a step of it does appends further work at the end, so no entry of the
/// queue waits for a later one. It is bounded by the rows and holders there are.
using WorkQueue = std::deque<Work>;

}  // namespace pegaflow::engine
