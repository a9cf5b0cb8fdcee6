#pragma once
/// \file
/// The part of the metrics page that describes the directory.

#include "base/program/metrics_page.h"
#include "server/http/nodes_report.h"

namespace pegaflow::server {

/// Adds the directory of a large cluster, and the links to nodes that it named.
void directory_metrics(MetricsPage& page, const DirectoryReport& now);

}  // namespace pegaflow::server
