#pragma once
/// \file
/// The time in which a server may make room for a save, as both ends of the wire count it.

#include <cstdint>

#include "base/clock.h"

namespace pegaflow {

/// The time that a `reserve` for so many bytes may take beyond its usual time: before the first
/// large block finds a place as many bytes of small blocks may have to be evicted, in slices. 0.25
/// us for a cold block of 4 KiB is 16 GB/s; this assumes half of it. The client adds it to its
/// deadline and the server to its patience, so that neither gives up before the other.
constexpr Duration time_to_make_room(std::uint64_t bytes) noexcept {
  constexpr std::uint64_t kBytesPerMicrosecond = 8192;
  return std::chrono::microseconds(bytes / kBytesPerMicrosecond);
}

}  // namespace pegaflow
