#pragma once
/// \file
/// Starts PegaFlow's threads.

#include <functional>
#include <thread>

#include "base/error.h"

namespace pegaflow {

/// Starts a thread with the name `name` (at most 15 bytes, the kernel's limit) and all signals
/// blocked: signal handlers of the host program must not run on PegaFlow's threads.
/// Errors: kInternal when the system has no thread left.
Result<std::thread> start_thread(const char* name, std::function<void()> body);

}  // namespace pegaflow
