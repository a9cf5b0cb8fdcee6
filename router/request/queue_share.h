#pragma once
/// \file
/// Whose share of the queue a request uses, and how long it would wait there.

#include <cstdint>
#include <string>

#include "base/clock.h"
#include "router/request/client_request.h"
#include "router/routing/fleet.h"
#include "router/state/shared.h"

namespace pegaflow::router {

/// The client for WaitingLine: the name of its API key, or a hash of the key that it sends to the
/// engines, or its address.
std::uint64_t queue_key(const ClientRequest& request);

/// The tokens of a prompt, as far as they are known; `body_bytes` / 4 otherwise.
std::uint64_t queue_tokens(const RequestView& view, std::size_t body_bytes);

/// The time after which a request like this one would get an engine: by the speed of the line, or
/// before anything was served by that of the engines. A second where neither is known.
Duration predicted_wait(const Shared& shared, const Fleet::Request& request, std::uint64_t key,
                        std::uint64_t tokens);

/// The line `Retry-After` for that time, in whole seconds from 1 on.
std::string retry_after(Duration wait);

}  // namespace pegaflow::router
