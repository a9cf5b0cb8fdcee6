#pragma once
/// \file
/// The greeting of a client's connection: versions, its process, and the session that it receives.

#include "server/rpc/rpc_server.h"
#include "server/rpc/session.h"

namespace pegaflow::server {

/// The service of an RpcServer for clients. The bootstrap of a connection calls `greeted` once,
/// when hello was answered with a session. `context` outlives it. Thread-bound.
RpcServer::Service client_service(SessionContext& context);

}  // namespace pegaflow::server
