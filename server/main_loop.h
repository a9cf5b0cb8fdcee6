#pragma once
/// \file
/// The loop of the RPC thread, one measured turn after the other.

#include <ctime>

#include <kj/async-io.h>
#include <kj/function.h>

#include "base/clock.h"
#include "server/cache/histogram.h"

namespace pegaflow::server {

/// Processor time of the calling thread.
inline Duration thread_cpu_time() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

/// Runs KJ's loop until `is_done()` after a turn, and records how long each turn took: from the
/// moment that descriptors or timers fired to the moment that nothing is left to do about them.
/// That is how long a request may wait that arrives just then. `turns_cpu` has the same in
/// processor time: on a machine that others share only that tells what the turn itself costs.
///
/// KJ 0.9.2 has no hook for this, so the event port is waited for here, and evalLast() tells when
/// the queue has run empty.
inline void run_loop(kj::AsyncIoContext& io, const Clock& clock, Histogram& turns,
                     Histogram& turns_cpu, kj::Function<bool()> is_done) {
  while (!is_done()) {
    io.unixEventPort.wait();
    const TimePoint begin = clock.now();
    const Duration cpu_begin = thread_cpu_time();
    kj::evalLast([]() {}).wait(io.waitScope);
    turns_cpu.record(thread_cpu_time() - cpu_begin);
    turns.record(clock.now() - begin);
  }
}

}  // namespace pegaflow::server
