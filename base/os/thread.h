#pragma once
/// \file
/// How our threads are started.

#include <functional>
#include <thread>

#include "base/error.h"

namespace pegaflow {

/// Starts a thread that is called `name` (at most 15 bytes: what the kernel keeps) and takes no
/// signal: handlers of the program that we live in are not to run on our threads.
/// Errors: kInternal when the system has no thread left.
Result<std::thread> start_thread(const char* name, std::function<void()> body);

}  // namespace pegaflow
