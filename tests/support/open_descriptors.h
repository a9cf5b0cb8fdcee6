#pragma once
/// \file
/// The open descriptors of a process.

#include <cstddef>
#include <filesystem>
#include <iterator>
#include <string>

#include <sys/types.h>
#include <unistd.h>

namespace pegaflow::testing {

/// Their number, of this process or of another one.
inline std::size_t open_descriptors(pid_t process = ::getpid()) {
  const std::filesystem::directory_iterator all("/proc/" + std::to_string(process) + "/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

}  // namespace pegaflow::testing
