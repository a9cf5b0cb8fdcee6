#pragma once
/// \file
/// Where the server of `--addr HOST:PORT` has its socket, as its clients find it.

#include <cstdint>
#include <string>

#include "base/runtime_directories.h"

namespace pegaflow {

/// `PORT.sock` in the explicit directory; else where it is there already; else in the first
/// directory that a server of this user could put it into.
std::string default_socket_path(std::uint16_t port, const RuntimeDirectories& directories);

}  // namespace pegaflow
