#pragma once
/// \file
/// Lines of memory that are asked for before they are needed.

namespace pegaflow::engine {

/// Has the cache line come that will be read. The address need not be mapped.
inline void prefetch_to_read(const void* line) noexcept {
  __builtin_prefetch(line, 0);
  // GCC takes a function that only prefetches for one without any effect, and drops calls of it.
  asm volatile("");
}

/// The same for one that will be written.
inline void prefetch_to_write(const void* line) noexcept {
  __builtin_prefetch(line, 1);
  asm volatile("");
}

}  // namespace pegaflow::engine
