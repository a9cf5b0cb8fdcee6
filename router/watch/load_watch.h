#pragma once
/// \file
/// Reads the load that engines report, for the policy kv-aware.

#include <memory>

#include "router/routing/fleet.h"
#include "router/state/shared.h"

namespace pegaflow::router {

/// Asks an engine for its metrics, if --engine-load-interval has passed since the last time. An
/// engine that answers without the page is asked again after a minute.
void refresh_engine_load(Shared& shared, const std::shared_ptr<Engine>& engine);

}  // namespace pegaflow::router
