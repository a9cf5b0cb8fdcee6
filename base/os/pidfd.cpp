#include "base/os/pidfd.h"

#include <cerrno>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/os/unique_fd.h"

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

std::optional<pid_t> own_number_of_pidfd(int fd) {
  const std::optional<pid_t> listed = process_of_pidfd(fd);
  if (!listed || *listed <= 0) return std::nullopt;
  // In another namespace's /proc the same number is another process. It is this one only if the
  // process that has it here is listed under it too.
  const UniqueFd same(static_cast<int>(::syscall(SYS_pidfd_open, *listed, 0)));
  if (!same || process_of_pidfd(same.get()) != listed) return std::nullopt;
  return listed;
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
