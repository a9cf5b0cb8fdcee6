#pragma once
/// \file
/// A request that a client announces, so that its blocks are fetched before it comes.

#include <boost/asio/awaitable.hpp>

#include "router/kv/kv_request.h"
#include "router/request/access_record.h"
#include "router/request/client_request.h"
#include "router/request/engine_needs.h"

namespace pegaflow::router {

/// Lets the server of the engine that would receive the request now fetch what that engine would
/// load from another node, and answers 202. The answer is the same when there is nothing to fetch,
/// or a limit is reached: it does not tell what caches hold. Nothing is sent to an engine, and no
/// account changes. A tenant has a part of each server's --prefetch-bytes. Returns false when the
/// connection has to end.
boost::asio::awaitable<bool> serve_announcement(ClientRequest& request, const EngineNeeds& needs,
                                                KvRequest* prompt, AccessRecord& record);

}  // namespace pegaflow::router
