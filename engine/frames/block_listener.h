#pragma once
/// \file
/// The receiver of reports about blocks that are sealed and dropped.

#include <cstdint>

#include "engine/types/ids.h"

namespace pegaflow::engine {

/// Called inside calls of the store, and may not call it. Thread-bound, as the store is.
class BlockListener {
 public:
  virtual ~BlockListener() = default;
  enum class From : std::uint8_t { kEngine, kNode, kDisk };
  /// The block of this frame is whole.
  virtual void sealed(FrameIndex frame, From from) = 0;
  /// The sealed block of this frame is dropped: another may be written to the frame.
  virtual void dropped(FrameIndex frame, bool is_evicted) = 0;
};

}  // namespace pegaflow::engine
