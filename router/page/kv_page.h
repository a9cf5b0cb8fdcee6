#pragma once
/// \file
/// The policy kv-aware on the router's pages.

#include <string>

#include "base/clock.h"
#include "base/program/metrics_page.h"
#include "router/kv/kv_routing.h"

namespace pegaflow::router {

/// A JSON object for /health: each rank of each engine with the state of its events and the reason.
std::string kv_health(const KvRouting& routing, TimePoint now);

/// Whether the events of every engine that publishes them are trusted.
bool kv_is_good(const KvRouting& routing);

/// The metrics of the policy.
void kv_metrics(MetricsPage& page, const KvRouting& routing, TimePoint now);

}  // namespace pegaflow::router
