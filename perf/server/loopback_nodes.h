#pragma once
/// \file
/// Several nodes on this machine, over loopback.

#include <cstddef>
#include <string>
#include <vector>

#include "base/error.h"
#include "harness/server_process.h"

namespace pegaflow::perf {

/// Addresses (IP:PORT) of `count` nodes, up to 250, which must know each other before they start.
/// The loopback addresses belong to this process, so their port is fixed.
std::vector<std::string> loopback_addresses(std::size_t count);

/// Waits until `server` can send requests to the node at `peer`. Errors: kTimeout; those of
/// metrics().
Result<void> wait_until_ready(const harness::ServerProcess& server, const std::string& peer);

}  // namespace pegaflow::perf
