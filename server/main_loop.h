#pragma once
/// \file
/// The loop of the RPC thread, one measured turn after the other.

#include <kj/async-io.h>
#include <kj/function.h>

#include "base/clock.h"
#include "server/histogram.h"

namespace pegaflow {

/// Runs KJ's loop until `is_done()` after a turn, and records how long each turn took: from the
/// moment that descriptors or timers fired to the moment that nothing is left to do about them.
/// That is how long a request may wait that arrives just then.
///
/// KJ 0.9.2 has no hook for this, so the event port is waited for here, and evalLast() tells when
/// the queue has run empty.
inline void run_loop(kj::AsyncIoContext& io, const Clock& clock, Histogram& turns,
                     kj::Function<bool()> is_done) {
  while (!is_done()) {
    io.unixEventPort.wait();
    const TimePoint begin = clock.now();
    kj::evalLast([]() {}).wait(io.waitScope);
    turns.record(clock.now() - begin);
  }
}

}  // namespace pegaflow
