#pragma once
/// \file
/// The processor's hint for a thread that spins.

namespace pegaflow {

/// Lets the other hardware thread of this core run for a moment: x86's `pause`, Arm's `yield`, and
/// no instruction elsewhere. Any thread.
inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace pegaflow
