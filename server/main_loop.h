#pragma once
/// \file
/// The event loop of the RPC thread, with each iteration measured.

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

/// Runs KJ's loop until `is_done()` returns true after an iteration, and records the duration of
/// each iteration: from the moment that descriptors or timers fire until no event is left to
/// handle. A request that arrives meanwhile may wait that long. `turns_cpu` has the same in
/// processor time, which excludes what other programs on the machine use.
///
/// KJ 0.9.2 has no hook for this, so the event port is waited for here, and evalLast() marks the
/// moment at which the queue is empty.
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
