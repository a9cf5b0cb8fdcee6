#include "base/os/pidfd.h"

#include <csignal>

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"

namespace pegaflow {
namespace {

TEST_SUITE("pidfd") {
  TEST_CASE("a process has its number until it is reaped, and has ended once it was killed") {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      for (;;) ::pause();
    }
    const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, child, 0)));
    REQUIRE(pidfd);
    CHECK(process_of_pidfd(pidfd.get()) == child);
    CHECK_FALSE(has_process_ended(pidfd.get()));

    ::kill(child, SIGKILL);
    siginfo_t info{};
    REQUIRE(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT) == 0);
    CHECK(process_of_pidfd(pidfd.get()) == child);
    CHECK(has_process_ended(pidfd.get()));

    REQUIRE(::waitpid(child, nullptr, 0) == child);
    CHECK(process_of_pidfd(pidfd.get()) == -1);
    CHECK(has_process_ended(pidfd.get()));
  }

  TEST_CASE("other descriptors have no process") {
    CHECK_FALSE(process_of_pidfd(STDERR_FILENO));
    CHECK_FALSE(process_of_pidfd(-1));
    CHECK(has_process_ended(-1));
  }
}

}  // namespace
}  // namespace pegaflow
