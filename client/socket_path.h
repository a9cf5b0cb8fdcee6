#pragma once
/// \file
/// Where the server of `--addr HOST:PORT` has its socket, as its clients find it.

#include <cstdint>
#include <string>

namespace pegaflow {

/// What the directory is chosen from. The server has the same rule in server/listener.h.
struct RuntimeDirectoryChoice {
  std::string explicit_directory;  ///< $PEGAFLOW_RUNTIME_DIR, empty when not set.
  std::string system = "/run/pegaflow";
  std::string user;  ///< $XDG_RUNTIME_DIR, empty when not set.

  static RuntimeDirectoryChoice from_environment();
};

/// `PORT.sock` in the explicit directory; else where it is there already; else in the first
/// directory that a server of this user could put it into.
std::string default_socket_path(std::uint16_t port, const RuntimeDirectoryChoice& choice);

}  // namespace pegaflow
