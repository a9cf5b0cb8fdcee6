#include "server/rpc/process_watch.h"

#include <charconv>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include <poll.h>
#include <unistd.h>

namespace pegaflow::server {
namespace {

/// The process of a pidfd: 0 in a PID namespace that is invisible here, -1 when it has ended. No
/// value when `fd` is not a pidfd: only pidfds have this line.
std::optional<int> process_of(int fd) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));
  for (std::string line; std::getline(info, line);) {
    constexpr std::string_view kField = "Pid:";
    if (!line.starts_with(kField)) continue;
    const std::size_t start = line.find_first_not_of(" \t", kField.size());
    if (start == std::string::npos) return std::nullopt;
    int pid = 0;
    const auto [end, status] = std::from_chars(line.data() + start, line.data() + line.size(), pid);
    if (status != std::errc()) return std::nullopt;
    return pid;
  }
  return std::nullopt;
}

/// Whether /proc is that of this process's PID namespace; else its numbers differ from those of the
/// socket.
bool is_own_proc() {
  char text[32] = {};
  const ssize_t length = ::readlink("/proc/self", text, sizeof text - 1);
  return length > 0 && std::to_string(::getpid()) == text;
}

bool is_readable(int fd) {
  pollfd wanted{fd, POLLIN, 0};
  return ::poll(&wanted, 1, 0) == 1;
}

}  // namespace

Result<std::shared_ptr<ProcessWatch>> ProcessWatch::start(kj::UnixEventPort& port, UniqueFd pidfd,
                                                          const Peer& peer,
                                                          kj::Function<void()> on_gone) {
  const std::optional<int> pid = process_of(pidfd.get());
  if (!pid) return fail(Errc::kRefused, "the descriptor that came with hello is not a pidfd");
  if (*pid < 0 || is_readable(pidfd.get())) {
    return fail(Errc::kRefused, "the process of the pidfd that came with hello has ended");
  }
  // Across PID namespaces one or both are 0, and there is nothing to compare.
  if (*pid > 0 && peer.pid > 0 && *pid != peer.pid && is_own_proc()) {
    return fail(Errc::kRefused, "process {} connected, but the pidfd in its hello is of {}",
                peer.pid, *pid);
  }
  return std::shared_ptr<ProcessWatch>(new ProcessWatch(port, std::move(pidfd), kj::mv(on_gone)));
}

ProcessWatch::ProcessWatch(kj::UnixEventPort& port, UniqueFd pidfd, kj::Function<void()> on_gone)
    : pidfd_(std::move(pidfd)),
      observer_(port, pidfd_.get(), kj::UnixEventPort::FdObserver::OBSERVE_READ),
      on_gone_(kj::mv(on_gone)),
      // A process that ended since start() looked makes the descriptor readable when it is added.
      gone_(
          observer_.whenBecomesReadable().then([this]() { on_gone_(); }).eagerlyEvaluate(nullptr)) {
}

}  // namespace pegaflow::server
