#pragma once
/// \file
/// The work that remains after something ended, in the order in which it ended.

#include <cstdint>
#include <deque>
#include <variant>

#include "engine/tables/frame_list.h"
#include "engine/types/ids.h"
#include "engine/types/shape.h"

namespace pegaflow::engine {

/// Blocks of a claim, pin or lease that ended; returned from the last one on, so that the end of a
/// chain is evicted first.
struct GiveBackWork {
  FrameList blocks;
};

/// Frames of a job that no shard writes any longer, from the last one on.
struct FreeJobWork {
  std::uint32_t job = 0;
};

/// Claims, reservations and, once its process is gone, pins of a holder that left. Pins of a few
/// blocks are returned in the same step.
struct LeaveWork {
  HolderId holder{};
};

/// Claims and reservations of a retired generation.
struct RetireWork {
  SpaceId space{};
};

/// Visits every frame for evictable blocks of retired generations. One entry is enough for all
/// generations.
struct DeadSweepWork {
  FrameIndex next = 0;
  bool again = false;  ///< A generation was retired after the sweep had begun.
};

/// Visits every frame for evictable blocks.
struct CleanupWork {
  FrameIndex next = 0;
};

/// Evicts the content of an extent that another shape will get.
struct LeavingWork {
  std::uint32_t extent = 0;
  std::uint64_t serial = 0;  ///< Serial of the extent: it may have ended by itself.
  ShapeId for_shape{};
  std::uint32_t next = 0;
};

/// Allocates the memory of a shape's tables page by page: thousands of page faults in the calls
/// that use it first, or in the one that creates them, would stall the event loop.
struct TouchWork {
  ShapeId shape{};
  std::size_t next = 0;
};

/// Returns the memory of an unused shape's tables, for the same reason in slices.
struct ForgetShapeWork {
  ShapeId shape{};
  std::size_t next = 0;
};

using Work = std::variant<GiveBackWork, FreeJobWork, LeaveWork, RetireWork, DeadSweepWork,
                          CleanupWork, LeavingWork, TouchWork, ForgetShapeWork>;

/// First in, first out. A step appends further work at the end, so no entry of the queue waits for
/// a later one. The count of rows and holders bounds its length.
using WorkQueue = std::deque<Work>;

}  // namespace pegaflow::engine
