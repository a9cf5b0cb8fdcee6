#pragma once
/// \file
/// The metrics about other nodes, and about blocks that are read past the pool.

#include "base/program/metrics_page.h"
#include "server/http/snapshot.h"

namespace pegaflow::server {

/// Everything about other nodes. Only with `now.nodes`.
void node_metrics(MetricsPage& page, const Snapshot& now);
/// Blocks that are brought into the pool for claims, from other nodes and from disks.
void fetch_metrics(MetricsPage& page, const FetchStats& fetches,
                   const engine::BlockStore::Stats& store);
/// Blocks that workers read out of the memory of other workers.
void direct_metrics(MetricsPage& page, const DirectStats& direct);

}  // namespace pegaflow::server
