#include "server/pool/keeper_link.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace pegaflow::server {
namespace {

namespace fs = std::filesystem;
using Kind = KeeperMessage::Kind;

constexpr std::chrono::milliseconds kRetry{50};

/// The descriptor under which the keeper's program gets its listening socket.
constexpr int kListenFd = 3;

Result<fs::path> keeper_program() {
  std::error_code problem;
  const fs::path self = fs::read_symlink("/proc/self/exe", problem);
  if (problem) return fail(Errc::kIo, "read /proc/self/exe: {}", problem.message());
  fs::path program = self.parent_path() / "pegaflow-keeper";
  if (::access(program.c_str(), X_OK) != 0) {
    return fail(Errc::kRefused, "--keep: {} is missing or cannot be executed", program.string());
  }
  return program;
}

/// In the child of a fork, of a process with threads: only system calls.
[[noreturn]] void become_keeper(const char* program, int listener) {
  constexpr int kFailed = 127;
  ::setsid();
  if (::fork() != 0) ::_exit(0);  // The keeper belongs to init.
  const int null = ::open("/dev/null", O_RDWR);
  for (int standard = 0; standard <= 2; ++standard) ::dup2(null, standard);
  if (listener == kListenFd) {
    ::fcntl(listener, F_SETFD, 0);
  } else {
    ::dup2(listener, kListenFd);
  }
  // Nothing else: a copy of the descriptor of a disk's file would hold its lock.
  ::syscall(SYS_close_range, kListenFd + 1, ~0U, 0);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  std::signal(SIGPIPE, SIG_DFL);
  if (::chdir("/") != 0) ::_exit(kFailed);
  const std::array<const char*, 4> arguments = {program, "--listen-fd", "3", nullptr};
  ::execv(program, const_cast<char* const*>(arguments.data()));
  ::_exit(kFailed);
}

/// Starts a keeper at the socket.
Result<void> start_keeper(const fs::path& path) {
  PEGA_TRY_LET(const fs::path program, keeper_program());
  PEGA_TRY_LET(const UniqueFd listener, listen_as_keeper(path));
  const std::string name = program.string();
  const pid_t child = ::fork();
  if (child < 0) return fail_errno(errno, "start the keeper");
  if (child == 0) become_keeper(name.c_str(), listener.get());
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  return {};
}

Result<UniqueFd> own_pidfd() {
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!fd) return fail_errno(errno, "--keep: pidfd_open");
  return fd;
}

Result<ReceivedMessage> answer_of(int socket,
                                  std::chrono::milliseconds patience = kAnswerPatience) {
  pollfd wanted{socket, POLLIN, 0};
  const int ready = ::poll(&wanted, 1, static_cast<int>(patience.count()));
  if (ready == 0) {
    return fail(Errc::kTimeout, "the keeper has not answered for {} ms", patience.count());
  }
  if (ready < 0) return fail_errno(errno, "wait for the keeper");
  PEGA_TRY_LET(std::optional<ReceivedMessage> received, receive_message(socket));
  if (!received) return fail(Errc::kPeerLost, "the keeper has ended");
  return std::move(*received);
}

KeeperMessage message_of(Kind kind) {
  KeeperMessage message;
  message.kind = kind;
  return message;
}

KeeperState state_of(const KeeperMessage& message) {
  return {.pool_bytes = message.pool_bytes,
          .keeper_pid = message.keeper_pid,
          .server_pid = message.pid,
          .clients = message.processes};
}

}  // namespace

Result<KeeperLink> KeeperLink::open(const fs::path& path, std::chrono::milliseconds patience) {
  PEGA_TRY_LET(std::optional<UniqueFd> fd, connect_to_keeper(path, patience));
  if (!fd) {
    PEGA_TRY(start_keeper(path));
    PEGA_TRY_LET(fd, connect_to_keeper(path, patience));
    if (!fd) return fail(Errc::kIo, "the keeper that was started at {} is gone", path.string());
  }
  return KeeperLink(std::move(*fd), patience);
}

Result<std::optional<KeeperLink>> KeeperLink::connect(const fs::path& path,
                                                      std::chrono::milliseconds patience) {
  PEGA_TRY_LET(std::optional<UniqueFd> fd, connect_to_keeper(path, patience));
  if (!fd) return std::optional<KeeperLink>();
  return std::optional(KeeperLink(std::move(*fd), patience));
}

Result<ReceivedMessage> KeeperLink::receive() { return answer_of(fd_.get(), patience_); }

Result<std::optional<KeptPool>> KeeperLink::take(const Clock& clock, const Patience& patience) {
  PEGA_TRY_LET(const UniqueFd self, own_pidfd());
  bool is_waiting = false;
  for (;;) {
    PEGA_TRY(send_message(fd_.get(), message_of(Kind::kTake), self.get()));
    PEGA_TRY_LET(ReceivedMessage received, receive());
    if (received.message.kind == Kind::kNothing) return std::optional<KeptPool>();
    if (received.message.kind == Kind::kPool) {
      KeptPool kept{.pool = std::move(received.fds[0]),
                    .tables = std::move(received.fds[1]),
                    .pool_bytes = received.message.pool_bytes,
                    .clients = {}};
      for (;;) {
        PEGA_TRY_LET(ReceivedMessage next, receive());
        if (next.message.kind == Kind::kEnd) return std::optional(std::move(kept));
        kept.clients.push_back({next.message.process, std::move(next.fds[0])});
      }
    }
    if (received.message.kind != Kind::kBusy) {
      return fail(Errc::kIo, "the keeper sent an unexpected message");
    }
    const std::int32_t pid = received.message.pid;
    if (patience.stop.load()) return fail(Errc::kCancelled, "take the pool: stopped");
    if (clock.now() >= patience.deadline) {
      return fail(Errc::kTimeout,
                  "the server with pid {} has the kept pool and has not ended: stop it, or start "
                  "this one at another --addr",
                  pid);
    }
    if (!std::exchange(is_waiting, true) && patience.waiting) patience.waiting(pid);
    // Until the deadline or the end of the former server, which only the keeper sees.
    ::poll(nullptr, 0, static_cast<int>(kRetry.count()));
  }
}

Result<void> KeeperLink::expect_done(const char* what) {
  PEGA_TRY_LET(const ReceivedMessage received, receive());
  if (received.message.kind == Kind::kDone) return {};
  return fail(Errc::kIo, "{}: the keeper refuses it", what);
}

Result<void> KeeperLink::put(int pool, int tables, std::uint64_t pool_bytes) {
  KeeperMessage message = message_of(Kind::kPut);
  message.pool_bytes = pool_bytes;
  PEGA_TRY(send_message(fd_.get(), message, pool, tables));
  return expect_done("keep the pool");
}

Result<void> KeeperLink::drop() {
  PEGA_TRY(send_message(fd_.get(), message_of(Kind::kDrop)));
  return expect_done("drop the kept pool");
}

Result<void> KeeperLink::add_client(const Id128& process, int pidfd) {
  KeeperMessage message = message_of(Kind::kProcess);
  message.process = process;
  return send_message(fd_.get(), message, pidfd);
}

void KeeperLink::forget_client(const Id128& process) {
  KeeperMessage message = message_of(Kind::kForget);
  message.process = process;
  (void)send_message(fd_.get(), message);
}

bool KeeperLink::is_lost() const {
  pollfd wanted{fd_.get(), POLLIN, 0};
  return ::poll(&wanted, 1, 0) == 1;
}

Result<std::optional<KeeperState>> keeper_state(const fs::path& path) {
  PEGA_TRY_LET(const std::optional<UniqueFd> fd, connect_to_keeper(path));
  if (!fd) return std::optional<KeeperState>();
  PEGA_TRY(send_message(fd->get(), message_of(Kind::kStatus)));
  PEGA_TRY_LET(const ReceivedMessage received, answer_of(fd->get()));
  return std::optional(state_of(received.message));
}

Result<std::optional<KeeperState>> release_keeper(const fs::path& path) {
  PEGA_TRY_LET(const std::optional<UniqueFd> fd, connect_to_keeper(path));
  if (!fd) return std::optional<KeeperState>();
  PEGA_TRY(send_message(fd->get(), message_of(Kind::kRelease)));
  PEGA_TRY_LET(const ReceivedMessage received, answer_of(fd->get()));
  if (received.message.kind == Kind::kBusy) {
    return fail(Errc::kRefused, "the server with pid {} uses the pool: stop it first",
                received.message.pid);
  }
  return std::optional(state_of(received.message));
}

}  // namespace pegaflow::server
