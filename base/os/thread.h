#pragma once
/// \file
/// Starts a thread that handles no signals.

#include <functional>
#include <thread>

#include "base/error.h"

namespace pegaflow {

/// Starts a thread that runs `body` and is named `name` (at most 15 bytes, the kernel's limit). All
/// signals are blocked on it, so that no signal handler of the host program runs there.
/// Errors: kInternal when the system cannot start another thread.
Result<std::thread> start_thread(const char* name, std::function<void()> body);

}  // namespace pegaflow
