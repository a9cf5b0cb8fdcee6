#pragma once
/// \file
/// Sends an engine's response to the client, streamed or not.

#include <string>

#include <boost/asio/awaitable.hpp>

#include "base/error.h"
#include "router/exchange/response_writer.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

/// Sends the response of `call`, whose head was read, to the client. `error` is set when the engine
/// failed. All arguments outlive the coroutine.
boost::asio::awaitable<Relayed> relay_response(ResponseWriter& writer, UpstreamCall& call,
                                               Error& error);

}  // namespace pegaflow::router
