#pragma once
/// \file
/// How the sockets of the lane are made.

#include "base/clock.h"
#include "base/error.h"
#include "base/os/unique_fd.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::tcp {

/// A listening socket that does not block. Errors: the kernel's, with the address.
Result<UniqueFd> listen_at(const SocketAddress& address);

/// Begins to connect and does not wait: the socket is writable once it has succeeded or failed.
/// Errors: the kernel's, with the address.
Result<UniqueFd> dial(const SocketAddress& address);

/// What every connection of the lane gets: small messages go at once, and a way that carries
/// nothing any more is found within `user_timeout`, also while the connection rests.
/// Errors: the kernel's.
Result<void> prepare(int socket, Duration user_timeout);

}  // namespace pegaflow::tcp
