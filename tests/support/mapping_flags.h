#pragma once
/// \file
/// The kernel's flags of a mapping of this process.

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

namespace pegaflow::testing {

/// The flags of the mapping that contains `address`, two letters each, with a space before and
/// after each, as /proc/self/smaps has them; empty without such a mapping.
inline std::string flags_of_mapping(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  constexpr std::string_view kFlags = "VmFlags:";
  std::ifstream maps("/proc/self/smaps");
  bool is_it = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.rfind(kFlags, 0) == 0) {
      if (is_it) return line.substr(kFlags.size()) + " ";
      continue;
    }
    const std::size_t dash = line.find('-');
    const std::size_t space = line.find(' ');
    if (dash == std::string::npos || space == std::string::npos || dash > space) continue;
    const std::uintptr_t begin = std::stoull(line.substr(0, dash), nullptr, 16);
    const std::uintptr_t end = std::stoull(line.substr(dash + 1, space - dash - 1), nullptr, 16);
    is_it = begin <= at && at < end;
  }
  return {};
}

}  // namespace pegaflow::testing
