#include "client/socket_path.h"

#include <cstdlib>

#include <unistd.h>

#include <fmt/core.h>

namespace pegaflow {
namespace {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

}  // namespace

RuntimeDirectoryChoice RuntimeDirectoryChoice::from_environment() {
  RuntimeDirectoryChoice choice;
  choice.explicit_directory = environment("PEGAFLOW_RUNTIME_DIR");
  choice.user = environment("XDG_RUNTIME_DIR");
  return choice;
}

std::string default_socket_path(std::uint16_t port, const RuntimeDirectoryChoice& choice) {
  const std::string name = fmt::format("/{}.sock", port);
  if (!choice.explicit_directory.empty()) return choice.explicit_directory + name;
  std::string system = choice.system + name;
  if (choice.user.empty() || ::access(system.c_str(), F_OK) == 0) return system;
  std::string user = choice.user + "/pegaflow" + name;
  if (::access(user.c_str(), F_OK) == 0) return user;
  return ::access(choice.system.c_str(), W_OK) == 0 ? system : user;
}

}  // namespace pegaflow
