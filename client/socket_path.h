#pragma once
/// \file
/// The path of a server's socket, from its `--addr HOST:PORT`.

#include <cstdint>
#include <string>

#include "base/runtime_directories.h"

namespace pegaflow {

/// Returns `PORT.sock` in the explicit directory; else in the directory where it exists; else in
/// the first directory in which this user's server could create it.
std::string default_socket_path(std::uint16_t port, const RuntimeDirectories& directories);

}  // namespace pegaflow
