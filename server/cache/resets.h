#pragma once
/// \file
/// Spreads a reset to all nodes that this one reaches, or that are connected to it.

#include <chrono>
#include <string>
#include <vector>

#include <kj/async.h>

#include "base/clock.h"
#include "cluster/epoch_watches.h"
#include "cluster/lender.h"
#include "server/cache/cache_service.h"

namespace pegaflow::server {

/// Sends the epoch of `space`, which was just raised, to all of `peers`, and waits until the nodes
/// of `watches` have fetched it. Returns the addresses of those that did not confirm it before the
/// deadline. That is not an error: their blocks of the namespace are not read until they have the
/// epoch, which they receive with the next greeting at the latest.
///
/// A peer may have a newer epoch that this node does not know yet, because this node had restarted
/// or both reset at once. Then blocks that were saved before this reset could have that epoch, so
/// the reset is repeated with a greater one. `watches` may be null. All arguments but `space`
/// outlive the promise. Thread-bound: the RPC thread.
kj::Promise<std::vector<std::string>> spread_reset(
    CacheService& service, cluster::Lenders& peers, cluster::EpochWatches* watches,
    const Clock& clock, const Bytes32& space, Duration deadline = std::chrono::milliseconds(400));

}  // namespace pegaflow::server
