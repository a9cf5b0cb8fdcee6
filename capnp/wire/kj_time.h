#pragma once
/// \file
/// Converts durations for KJ's timers.

#include <algorithm>

#include <kj/time.h>

#include "base/clock.h"

namespace pegaflow {

/// A negative duration counts as zero.
inline kj::Duration to_kj(Duration time) {
  return std::max(Duration::zero(), time).count() * kj::NANOSECONDS;
}

}  // namespace pegaflow
