#pragma once
/// \file
/// cache.capnp on the server's side: decodes a call, calls the CacheService, encodes the response.

#include <cstdint>
#include <memory>

#include "base/id128.h"
#include "capnp/cache.capnp.h"
#include "server/rpc/session_context.h"

namespace pegaflow::server {

class ProcessWatch;

/// Serves the calls of a greeted connection, in that version of the protocol. `process` is that of
/// the client; null: it cannot be watched. `context` outlives the session. Thread-bound.
wire::Session::Client make_session(SessionContext& context, const Id128& connection,
                                   std::uint16_t version,
                                   std::shared_ptr<const ProcessWatch> process);

}  // namespace pegaflow::server
