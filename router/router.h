#pragma once
/// \file
/// pegaflow-router as a whole.

#include "base/error.h"
#include "router/config/options.h"

namespace pegaflow::router {

/// Serves until SIGTERM or SIGINT, then finishes what it has and returns.
/// Errors: kInvalidArgument for options that name no engine, policy or readable file; kIo and
/// kRefused for a place where it cannot listen.
Result<void> run_router(const RouterOptions& options);

}  // namespace pegaflow::router
