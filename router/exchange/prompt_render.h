#pragma once
/// \file
/// Token ids for a long prompt that the router does not know, from a server of --render.

#include <string>
#include <string_view>

#include <boost/asio/awaitable.hpp>

#include "router/kv/kv_request.h"
#include "router/request/client_wait.h"
#include "router/state/shared.h"

namespace pegaflow::router {

/// Sets the blocks of a request of the route `route` whose text is long and unknown. It has no
/// effect on others, without --render, and on a conversation that was asked about before. It ends
/// within --render-timeout, and where no server answers by then the prompt stays unknown. The end
/// of `wait` ends it. All of them outlive the coroutine.
boost::asio::awaitable<void> render_prompt(Shared& shared, KvRequest& request,
                                           std::string_view route, const std::string& body,
                                           ClientWait& wait);

}  // namespace pegaflow::router
