#pragma once
/// \file
/// The wait of a request for the placements of other routers.

#include <boost/asio/awaitable.hpp>

#include "router/request/client_wait.h"
#include "router/request/engine_needs.h"
#include "router/state/shared.h"

namespace pegaflow::router {

/// Waits until it is this router's turn to place a request of this instant, so that two routers do
/// not send new prompts to the same idle engine. The wait ends when the others have placed nothing
/// for 2 ms and 1 ms for each further one; the limit is 4 ms for each of them, and 5 % of the time
/// in which the prompt is computed. It has no effect without other routers, and on requests that
/// the policy kv-aware does not know. The end of `wait` ends it. All of them outlive the coroutine.
boost::asio::awaitable<void> wait_for_turn(Shared& shared, const EngineNeeds& needs, Role role,
                                           ClientWait& wait);

}  // namespace pegaflow::router
