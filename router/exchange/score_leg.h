#pragma once
/// \file
/// The requests of those who place requests themselves: POST /score, POST /learn, GET /index/dump.

#include <string>

#include <boost/asio/awaitable.hpp>

#include "router/request/access_record.h"
#include "router/request/client_request.h"

namespace pegaflow::router {

/// Sends the response to a request of one of these routes. False when the client left.
boost::asio::awaitable<bool> serve_scores(ClientRequest& request, AccessRecord& record,
                                          const std::string& body);

}  // namespace pegaflow::router
