#pragma once
/// \file
/// The file descriptors that a server needs.

#include <cstddef>
#include <cstdint>

#include "server/options.h"

namespace pegaflow::server {

/// Descriptors beside those of clients: the pool, listeners, event loops, HTTP, files.
inline constexpr std::uint64_t kOwnDescriptors = 256;

/// Descriptors for other nodes. As many nodes dial this one as it lists; one without a list may be
/// dialed by any.
std::uint64_t descriptors_for_peers(const ServerOptions& options);

/// Raises the limit of descriptors to the kernel's maximum, and returns the number of client
/// connections, at most `wanted`, that fit beside `own`.
std::size_t connections_that_fit(std::size_t wanted, std::uint64_t own);

}  // namespace pegaflow::server
