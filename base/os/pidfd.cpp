#include "base/os/pidfd.h"

#include <array>
#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/os/unique_fd.h"

namespace pegaflow {
namespace {

/// After a system call that has made no descriptor. Errors: kBusy when none is free.
Result<void> check_shortage() {
  auto error = fail_errno(errno, "make a descriptor");
  if (error.value().code != Errc::kBusy) return {};
  return error;
}

/// As process_of_pidfd(). Errors: kBusy when no descriptor is free.
Result<std::optional<pid_t>> listed_number(int fd) {
  const std::string path = "/proc/self/fdinfo/" + std::to_string(fd);
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) {
    PEGA_TRY(check_shortage());
    return std::nullopt;
  }
  std::string text;
  std::array<char, 512> some{};
  for (ssize_t count = 0; (count = ::read(file.get(), some.data(), some.size())) > 0;) {
    text.append(some.data(), static_cast<std::size_t>(count));
  }
  constexpr std::string_view kField = "\nPid:";  // Only pidfds have this line.
  const std::size_t field = text.find(kField);
  if (field == std::string::npos) return std::nullopt;
  const std::size_t start = text.find_first_not_of(" \t", field + kField.size());
  if (start == std::string::npos) return std::nullopt;
  pid_t pid = 0;
  const auto [end, status] = std::from_chars(text.data() + start, text.data() + text.size(), pid);
  if (status != std::errc()) return std::nullopt;
  return pid;
}

}  // namespace

std::optional<pid_t> process_of_pidfd(int fd) {
  return listed_number(fd).value_or(std::optional<pid_t>());
}

Result<pid_t> own_number_of_pidfd(int fd) {
  PEGA_TRY_LET(const std::optional<pid_t> listed, listed_number(fd));
  if (!listed) {
    return fail(Errc::kRefused, "descriptor {} is not a pidfd, or /proc is not mounted", fd);
  }
  if (*listed > 0) {
    // In another namespace's /proc the same number is another process. It is this one only if the
    // process that has it here is listed under it too.
    const UniqueFd same(static_cast<int>(::syscall(SYS_pidfd_open, *listed, 0)));
    if (!same) PEGA_TRY(check_shortage());
    PEGA_TRY_LET(const std::optional<pid_t> again, listed_number(same.get()));
    if (same && again == listed) return *listed;
  }
  if (has_process_ended(fd)) return fail(Errc::kGone, "process {} has ended", *listed);
  return fail(Errc::kRefused,
              "the process is in a PID namespace that is not visible here; run both engines in one "
              "PID namespace");
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
