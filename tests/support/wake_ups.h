#pragma once
/// \file
/// How often a process wakes up.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include <poll.h>
#include <sys/types.h>

#include "tests/support/server_process.h"

namespace pegaflow::testing {

/// The number of times that the threads of a process went to sleep by themselves: once for each
/// wake-up.
inline std::uint64_t sleeps_of(pid_t pid) {
  std::uint64_t sum = 0;
  const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      constexpr std::string_view kField = "voluntary_ctxt_switches:";
      if (line.starts_with(kField)) sum += std::stoull(line.substr(kField.size()));
    }
  }
  return sum;
}

/// The wake-ups of a process in the first second without any, or in the last of many.
inline std::uint64_t wake_ups_in_a_second(pid_t pid) {
  std::uint64_t wake_ups = 0;
  for (auto seconds = kHang; seconds.count() > 0; --seconds) {
    const std::uint64_t before = sleeps_of(pid);
    ::poll(nullptr, 0, 1000);  // The observed second: only its events are counted.
    wake_ups = sleeps_of(pid) - before;
    if (wake_ups == 0) break;
  }
  return wake_ups;
}

}  // namespace pegaflow::testing
