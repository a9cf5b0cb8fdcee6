#pragma once
/// \file
/// Several nodes on this machine, over loopback.

#include <cstddef>
#include <string>
#include <vector>

#include "base/error.h"
#include "harness/server_process.h"

namespace pegaflow::perf {

/// Addresses (IP:PORT) of `count` nodes, up to 250, which have to know each other before any of
/// them runs. They are this process's alone, so that a port of its own is not needed.
std::vector<std::string> loopback_addresses(std::size_t count);

/// Waits until `server` can ask the node at `peer`. Errors: kTimeout; those of metrics().
Result<void> wait_until_ready(const harness::ServerProcess& server, const std::string& peer);

}  // namespace pegaflow::perf
