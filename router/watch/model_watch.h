#pragma once
/// \file
/// Polls engines for their models.

#include <chrono>
#include <memory>

#include <boost/asio/awaitable.hpp>

#include "router/state/shared.h"

namespace pegaflow::router {

/// The minimum time between two polls that requests of clients cause, so that clients cannot flood
/// an engine with polls.
inline constexpr std::chrono::seconds kModelsPause(1);

/// Reads the engine's /v1/models and updates its list, within --health-timeout. An invalid response
/// leaves the list unchanged. Returns at once when another read is in flight.
boost::asio::awaitable<void> read_model_list(Shared& shared, std::shared_ptr<Engine> engine);

/// Begins read_model_list() unless the last read began less than `pause` ago.
void refresh_model_list(Shared& shared, const std::shared_ptr<Engine>& engine, Duration pause);

}  // namespace pegaflow::router
