#pragma once
/// \file
/// The policy kv-aware on the router's pages.

#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/program/metrics_page.h"
#include "router/kv/kv_routing.h"

namespace pegaflow::router {

/// A JSON object for /health: each rank of each engine with the state of its events and the reason.
std::string kv_health(const KvRouting& routing, TimePoint now);

/// The state of a rank's events: "exact", "no_events".
std::string_view events_state(const KvFleet::Rank& rank);
/// The reason for that state.
std::string_view events_reason(const KvFleet::Entry& entry, const KvFleet::Rank& rank);

/// Whether the events of every engine that publishes them are trusted.
bool kv_is_good(const KvRouting& routing);

/// The metrics of the policy.
void kv_metrics(MetricsPage& page, const KvRouting& routing, TimePoint now);

}  // namespace pegaflow::router
