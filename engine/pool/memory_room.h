#pragma once
/// \file
/// How much memory the kernel can still give us, before we ask for it.

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/error.h"

namespace pegaflow::engine {

/// What is left, and who limits it. On tmpfs the question has to be asked before fallocate():
/// fallocate() does not fail when memory is short, it wakes the OOM killer.
struct MemoryRoom {
  std::uint64_t available_bytes = 0;  ///< Could be had now.
  std::uint64_t possible_bytes = 0;   ///< Could be had if everybody else gave theirs back.
  std::string limited_by;             ///< "MemAvailable", or the cgroup's directory.
};

/// The smallest of MemAvailable and what each memory cgroup from ours up to the root has left.
/// A cgroup's file pages that nobody used lately count as left: the kernel drops them first, and
/// model files read at start would otherwise look like memory in use.
///
/// `proc` and `cgroup` are "/proc" and "/sys/fs/cgroup" except in tests. Both cgroup versions are
/// read; a cgroup that we cannot see limits nothing that we could know of.
/// Errors: kIo when MemAvailable cannot be read.
Result<MemoryRoom> memory_room(const std::filesystem::path& proc = "/proc",
                               const std::filesystem::path& cgroup = "/sys/fs/cgroup");

/// Huge pages of the default size: how large one is, and how many nobody has or is promised.
struct HugePages {
  std::uint64_t page_bytes = 0;  ///< 0: the kernel has none.
  std::uint64_t free = 0;
  std::uint64_t total = 0;
};
/// Errors: kIo when meminfo cannot be read.
Result<HugePages> huge_pages(const std::filesystem::path& proc = "/proc");

}  // namespace pegaflow::engine
