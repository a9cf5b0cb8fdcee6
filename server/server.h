#pragma once
/// \file
/// One running pegaflow-server: assembles its parts and runs until a signal stops it.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "server/options.h"
#include "server/rpc/listener.h"

namespace pegaflow::server {

/// Serves until SIGTERM or SIGINT, then ends in order: accepts no connection, removes its sockets,
/// joins its threads. A second signal ends the process at once.
///
/// To be called once, on a process with one thread: it captures the two signals, and its thread
/// becomes the RPC thread.
/// Errors: the reason why the server cannot start, in one sentence for the operator.
Result<void> run_server(const ServerOptions& options, const RuntimeDirectories& directories);

/// Ends the keeper at `options.addr`, and prints what that freed.
/// Errors: kRefused without a keeper, or while a server uses it.
Result<void> release_kept_pool(const ServerOptions& options, const RuntimeDirectories& directories);

}  // namespace pegaflow::server
