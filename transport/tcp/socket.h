#pragma once
/// \file
/// Creates the sockets of the lane.

#include "base/clock.h"
#include "base/error.h"
#include "base/os/unique_fd.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::tcp {

/// Returns a non-blocking listening socket. Errors: the kernel's, with the address.
Result<UniqueFd> listen_at(const SocketAddress& address);

/// Begins to connect and does not wait: the socket becomes writable when it has succeeded or
/// failed. Errors: the kernel's, with the address.
Result<UniqueFd> dial(const SocketAddress& address);

/// Sets the options of every connection of the lane: small messages are sent at once, and a dead
/// path is detected within `user_timeout`, even while the connection is idle. Errors: the kernel's.
Result<void> prepare(int socket, Duration user_timeout);

}  // namespace pegaflow::tcp
