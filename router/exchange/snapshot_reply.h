#pragma once
/// \file
/// The response to GET /index/snapshot.

#include <boost/asio/awaitable.hpp>

#include "router/request/access_record.h"
#include "router/request/client_request.h"

namespace pegaflow::router {

/// Sends the snapshot in parts, at 50 MB/s at most and with an event-loop iteration between them.
/// check_head() has checked the token. False when the connection has to end.
boost::asio::awaitable<bool> send_snapshot(ClientRequest& request, AccessRecord& record);

}  // namespace pegaflow::router
