#pragma once
/// \file
/// How much memory the kernel can still provide, checked before it is requested.

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/error.h"

namespace pegaflow::engine {

/// The memory that is left, and what limits it. On tmpfs this must be checked before fallocate():
/// when memory is short, fallocate() does not fail but wakes the OOM killer.
struct MemoryRoom {
  std::uint64_t available_bytes = 0;  ///< Available now.
  std::uint64_t possible_bytes = 0;   ///< Available if all other processes returned theirs.
  std::string limited_by;             ///< "MemAvailable", or the cgroup's directory.
};

/// The smallest of MemAvailable and the remainder of each memory cgroup from ours up to the root. A
/// cgroup's file pages that were not used lately count as free: the kernel drops them first, and
/// model files read at start would otherwise look like memory in use.
///
/// `proc` and `cgroup` are "/proc" and "/sys/fs/cgroup" except in tests. Both cgroup versions are
/// read; a cgroup that is not visible here has no known limit.
/// Errors: kIo when MemAvailable cannot be read.
Result<MemoryRoom> memory_room(const std::filesystem::path& proc = "/proc",
                               const std::filesystem::path& cgroup = "/sys/fs/cgroup");

/// Huge pages of the default size: their size, and the number that is neither in use nor reserved.
struct HugePages {
  std::uint64_t page_bytes = 0;  ///< 0: the kernel has none.
  std::uint64_t free = 0;
  std::uint64_t total = 0;
};
/// Errors: kIo when meminfo cannot be read.
Result<HugePages> huge_pages(const std::filesystem::path& proc = "/proc");

}  // namespace pegaflow::engine
