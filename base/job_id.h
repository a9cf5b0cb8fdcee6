#pragma once
/// \file
/// The name of a save, the same in the engine, on the wire and in the store.

#include <compare>
#include <cstdint>

#include "base/id128.h"

namespace pegaflow {

/// Identifies the blocks that one step of one instance saves. Immutable.
struct JobId {
  Id128 scheduler;           ///< The scheduler's incarnation, so that a name is never used twice.
  std::uint64_t number = 0;  ///< Rising.
  auto operator<=>(const JobId&) const noexcept = default;
};

}  // namespace pegaflow
