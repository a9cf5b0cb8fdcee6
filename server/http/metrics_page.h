#pragma once
/// \file
/// The /metrics page. Established metric names keep their meaning.

#include <string>

#include "server/http/snapshot.h"

namespace pegaflow::server {

/// Prometheus' text format, all names with the prefix pegaflow_. A sample exists from the start
/// with 0, so that a rate can be taken of its first event; only rpc_requests_total has its samples
/// from the first call of a method and status on.
std::string metrics_page(const Snapshot& snapshot);

}  // namespace pegaflow::server
