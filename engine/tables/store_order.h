#pragma once
/// \file
/// The order of stores into memory that outlives the process.

#include <atomic>

namespace pegaflow::engine {

/// A process that looks at the memory once this one is dead sees what this thread stored before the
/// call, if it sees what was stored after it.
inline void order_stores() noexcept { std::atomic_thread_fence(std::memory_order_release); }

}  // namespace pegaflow::engine
