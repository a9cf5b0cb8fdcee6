#pragma once
/// \file
/// The deadline of a call, for exclusiveJoin() with its answer.

#include <kj/timer.h>

#include "capnp/wire/kj_time.h"

namespace pegaflow {

/// Resolves `time` from now, once what had arrived by then has been read.
///
/// A thread that was not scheduled for a while finds its timers and its sockets due together, and
/// a timer fires sooner than an answer is decoded. A timer of zero length fires only after the loop
/// has nothing else to do and has looked at its sockets once more.
inline kj::Promise<void> deadline_in(kj::Timer& timer, Duration time) {
  return timer.afterDelay(to_kj(time)).then([&timer]() { return timer.afterDelay(to_kj({})); });
}

}  // namespace pegaflow
