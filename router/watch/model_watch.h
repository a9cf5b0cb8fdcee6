#pragma once
/// \file
/// Asks engines which models they serve.

#include <chrono>
#include <memory>

#include <boost/asio/awaitable.hpp>

#include "router/state/shared.h"

namespace pegaflow::router {

/// The shortest time between two questions that requests of clients cause, so that clients cannot
/// flood an engine with them.
inline constexpr std::chrono::seconds kModelsPause(1);

/// Asks for the engine's /v1/models and keeps its list up to date, within --health-timeout. An
/// answer that is no list leaves the former one; a question that is open already is enough.
boost::asio::awaitable<void> read_model_list(Shared& shared, std::shared_ptr<Engine> engine);

/// Begins read_model_list() unless the engine was asked less than `pause` ago.
void refresh_model_list(Shared& shared, const std::shared_ptr<Engine>& engine, Duration pause);

}  // namespace pegaflow::router
