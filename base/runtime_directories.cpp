#include "base/runtime_directories.h"

#include <cstdlib>

namespace pegaflow {
namespace {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

}  // namespace

RuntimeDirectories RuntimeDirectories::from_environment() {
  RuntimeDirectories directories;
  directories.explicit_directory = environment("PEGAFLOW_RUNTIME_DIR");
  const std::string user = environment("XDG_RUNTIME_DIR");
  if (!user.empty()) directories.user = user + "/pegaflow";
  return directories;
}

}  // namespace pegaflow
