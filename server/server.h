#pragma once
/// \file
/// One running pegaflow-server: puts its parts together and runs until told to stop.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "server/options.h"
#include "server/rpc/listener.h"

namespace pegaflow::server {

/// Serves until SIGTERM or SIGINT, then ends in order: nobody new, sockets removed, threads joined.
/// A second signal ends the process at once.
///
/// To be called once, on a process with one thread: it captures the two signals, and its thread
/// becomes the RPC thread.
/// Errors: what stood in the way of the start, in one sentence for the operator.
Result<void> run_server(const ServerOptions& options, const RuntimeDirectories& directories);

}  // namespace pegaflow::server
