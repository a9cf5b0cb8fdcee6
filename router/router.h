#pragma once
/// \file
/// The service pegaflow-router.

#include "base/error.h"
#include "router/config/options.h"

namespace pegaflow::router {

/// Serves until SIGTERM or SIGINT, then finishes the requests in flight and returns.
/// Errors: kInvalidArgument for options without a valid engine, policy or readable file; kIo and
/// kRefused for an address at which it cannot listen.
Result<void> run_router(const RouterOptions& options);

}  // namespace pegaflow::router
