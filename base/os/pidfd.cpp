#include "base/os/pidfd.h"

#include <cerrno>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>

#include <poll.h>

namespace pegaflow {

std::optional<pid_t> process_of_pidfd(int fd) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));
  for (std::string line; std::getline(info, line);) {
    constexpr std::string_view kField = "Pid:";  // Only pidfds have this line.
    if (!line.starts_with(kField)) continue;
    const std::size_t start = line.find_first_not_of(" \t", kField.size());
    if (start == std::string::npos) return std::nullopt;
    pid_t pid = 0;
    const auto [end, status] = std::from_chars(line.data() + start, line.data() + line.size(), pid);
    if (status != std::errc()) return std::nullopt;
    return pid;
  }
  return std::nullopt;
}

bool has_process_ended(int pidfd) {
  if (pidfd < 0) return true;  // poll() would skip it.
  pollfd wanted{pidfd, POLLIN, 0};
  int ready = 0;
  do {
    ready = ::poll(&wanted, 1, 0);
  } while (ready < 0 && errno == EINTR);
  return ready != 0;
}

}  // namespace pegaflow
