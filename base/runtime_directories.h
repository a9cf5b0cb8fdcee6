#pragma once
/// \file
/// The directories of a server's socket, on which the server and its clients have to agree.

#include <string>

namespace pegaflow {

/// The candidates for the socket's directory: the explicit one, else the system's, else the user's.
/// The server takes the first that it can write to (server/rpc/listener.h), a client the first that
/// has the socket (client/socket_path.h).
struct RuntimeDirectories {
  std::string explicit_directory{};  ///< $PEGAFLOW_RUNTIME_DIR; empty when not set.
  std::string system = "/run/pegaflow";
  std::string user{};  ///< `$XDG_RUNTIME_DIR/pegaflow`; empty when not set.

  static RuntimeDirectories from_environment();
};

}  // namespace pegaflow
