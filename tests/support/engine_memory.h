#pragma once
/// \file
/// harness::EngineMemory with exceptions instead of errors.

#include <cstddef>
#include <cstdint>

#include "harness/engine_memory.h"
#include "harness/pattern.h"

namespace pegaflow::testing {

using harness::EngineMemory;

/// Memory of `blocks` blocks in `segments` allocations, with `gap_bytes` after each segment that no
/// copy may touch. Throws when PageLayout::create() fails.
inline EngineMemory engine_memory(std::size_t segments, std::size_t segment_bytes,
                                  std::size_t blocks, std::size_t gap_bytes = 64) {
  return EngineMemory::create({.segments = segments,
                               .segment_bytes = segment_bytes,
                               .blocks = blocks,
                               .gap_bytes = gap_bytes})
      .value();
}

/// Writes the bytes of EngineMemory::fill() into a page.
inline void fill_page(std::byte* page, std::size_t bytes, std::uint64_t seed) {
  harness::write_pattern({page, bytes}, seed);
}

}  // namespace pegaflow::testing
