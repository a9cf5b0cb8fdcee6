#include "client/socket_path.h"

#include <unistd.h>

#include <fmt/core.h>

namespace pegaflow {

std::string default_socket_path(std::uint16_t port, const RuntimeDirectories& directories) {
  const std::string name = fmt::format("/{}.sock", port);
  if (!directories.explicit_directory.empty()) return directories.explicit_directory + name;
  std::string system = directories.system + name;
  if (directories.user.empty() || ::access(system.c_str(), F_OK) == 0) return system;
  std::string user = directories.user + name;
  if (::access(user.c_str(), F_OK) == 0) return user;
  return ::access(directories.system.c_str(), W_OK) == 0 ? system : user;
}

}  // namespace pegaflow
