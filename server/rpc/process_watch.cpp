#include "server/rpc/process_watch.h"

#include <optional>
#include <string>
#include <utility>

#include <unistd.h>

#include "base/os/pidfd.h"

namespace pegaflow::server {
namespace {

/// Whether /proc is that of this process's PID namespace; else its numbers differ from those of the
/// socket.
bool is_own_proc() {
  char text[32] = {};
  const ssize_t length = ::readlink("/proc/self", text, sizeof text - 1);
  return length > 0 && std::to_string(::getpid()) == text;
}

}  // namespace

Result<std::shared_ptr<ProcessWatch>> ProcessWatch::start(kj::UnixEventPort& port, UniqueFd pidfd,
                                                          const Peer& peer,
                                                          kj::Function<void()> on_gone) {
  const std::optional<pid_t> pid = process_of_pidfd(pidfd.get());
  if (!pid) return fail(Errc::kRefused, "the descriptor that came with hello is not a pidfd");
  if (*pid < 0 || has_process_ended(pidfd.get())) {
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
