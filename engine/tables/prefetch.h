#pragma once
/// \file
/// Cache lines that are requested before they are needed.

namespace pegaflow::engine {

/// Prefetches a cache line for reading. The address need not be mapped.
inline void prefetch_to_read(const void* line) noexcept {
  __builtin_prefetch(line, 0);
  // GCC considers a function that only prefetches to have no effect, and drops calls of it.
  asm volatile("");
}

/// Prefetches a cache line for writing.
inline void prefetch_to_write(const void* line) noexcept {
  __builtin_prefetch(line, 1);
  asm volatile("");
}

}  // namespace pegaflow::engine
