#include "engine/pool/memory_room.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>

namespace pegaflow::engine {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

std::optional<std::string> read_text(const fs::path& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

/// The first number in `text`; no value for "max" and the like.
std::optional<std::uint64_t> first_number(std::string_view text) {
  const std::size_t start = text.find_first_of("0123456789");
  if (start == std::string_view::npos) return std::nullopt;
  std::uint64_t number = 0;
  const auto [end, status] =
      std::from_chars(text.data() + start, text.data() + text.size(), number);
  if (status != std::errc()) return std::nullopt;
  return number;
}

/// The number after `name` at the beginning of a line.
std::optional<std::uint64_t> field(const std::string& text, std::string_view name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name)) return first_number(std::string_view(line).substr(name.size()));
  }
  return std::nullopt;
}

std::optional<std::uint64_t> number_in(const fs::path& path) {
  const auto text = read_text(path);
  return text ? first_number(*text) : std::nullopt;
}

/// The files of one version of the cgroup interface.
struct Interface {
  const char* limit;
  const char* usage;
  const char* inactive_file;  // In memory.stat; includes the groups below.
};
constexpr Interface kVersion2{"memory.max", "memory.current", "inactive_file"};
constexpr Interface kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                              "total_inactive_file"};

/// Narrows `room` by the group at `relative` below `root` and by each group above it.
void narrow(MemoryRoom& room, const fs::path& root, fs::path relative, const Interface& files) {
  for (;; relative = relative.parent_path()) {
    const fs::path group = relative.empty() ? root : root / relative;
    const auto limit = number_in(group / files.limit);
    const auto usage = number_in(group / files.usage);
    if (limit && usage) {
      const auto stat = read_text(group / "memory.stat");
      const std::uint64_t droppable = stat ? field(*stat, files.inactive_file).value_or(0) : 0;
      const std::uint64_t held = *usage - std::min(*usage, droppable);
      const std::uint64_t left = *limit - std::min(*limit, held);
      room.possible_bytes = std::min(room.possible_bytes, *limit);
      if (left < room.available_bytes) {
        room.available_bytes = left;
        room.limited_by = group.string();
      }
    }
    if (relative.empty()) return;
  }
}

}  // namespace

Result<MemoryRoom> memory_room(const fs::path& proc, const fs::path& cgroup) {
  const auto meminfo = read_text(proc / "meminfo");
  const auto available = meminfo ? field(*meminfo, "MemAvailable:") : std::nullopt;
  if (!available) {
    return fail(Errc::kIo, "read MemAvailable from {}", (proc / "meminfo").string());
  }
  MemoryRoom room{.available_bytes = *available * 1024,
                  .possible_bytes = field(*meminfo, "MemTotal:").value_or(kNoLimit / 1024) * 1024,
                  .limited_by = "MemAvailable"};

  // Lines are HIERARCHY:CONTROLLERS:PATH; version 2 has an empty list of controllers.
  std::istringstream groups(read_text(proc / "self/cgroup").value_or(""));
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const fs::path relative = fs::path(line.substr(second + 1)).relative_path();
    if (controllers == ",,") {
      narrow(room, cgroup, relative, kVersion2);
    } else if (controllers.find(",memory,") != std::string::npos) {
      narrow(room, cgroup / "memory", relative, kVersion1);
    }
  }
  return room;
}

Result<HugePages> huge_pages(const fs::path& proc) {
  const auto meminfo = read_text(proc / "meminfo");
  if (!meminfo) return fail(Errc::kIo, "read {}", (proc / "meminfo").string());
  HugePages pages;
  pages.page_bytes = field(*meminfo, "Hugepagesize:").value_or(0) * 1024;
  const std::uint64_t free = field(*meminfo, "HugePages_Free:").value_or(0);
  const std::uint64_t promised = field(*meminfo, "HugePages_Rsvd:").value_or(0);
  pages.free = free - std::min(free, promised);
  pages.total = field(*meminfo, "HugePages_Total:").value_or(0);
  return pages;
}

}  // namespace pegaflow::engine
