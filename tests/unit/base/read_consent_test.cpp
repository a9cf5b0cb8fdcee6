#include "base/os/read_consent.h"

#include <cerrno>
#include <csignal>
#include <fstream>
#include <optional>

#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "tests/support/skip.h"

namespace pegaflow {
namespace {

UniqueFd pidfd_of(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

/// A child that waits until it is killed.
struct Child {
  Child() : pid(::fork()) {
    while (pid == 0) ::pause();
    pidfd = pidfd_of(pid);
  }
  ~Child() { end(); }
  void end() {
    if (has_ended) return;
    has_ended = true;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  pid_t pid;
  UniqueFd pidfd;
  bool has_ended = false;
};

/// kernel.yama.ptrace_scope; none without Yama.
std::optional<int> ptrace_scope() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope ? std::optional(scope) : std::nullopt;
}

TEST_SUITE("ReadConsent") {
  TEST_CASE("consent is needed with ptrace_scope 1 alone") {
    CHECK(kernel_read_consent().is_needed == (ptrace_scope() == 1));
  }

  TEST_CASE("a process that has ended, or no process at all, gets no consent") {
    const ReadConsent consent = kernel_read_consent();
    Child child;
    child.end();
    CHECK(consent.give(child.pidfd.get()).error().code == Errc::kGone);
    const UniqueFd other(::eventfd(0, EFD_CLOEXEC));
    CHECK(consent.give(other.get()).error().code == Errc::kRefused);
    CHECK(consent.give(-1));
  }

  TEST_CASE("a kernel without Yama refuses the consent, and takes it back without an error") {
    const ReadConsent consent = kernel_read_consent();
    const Child child;
    const Result<void> given = consent.give(child.pidfd.get());
    CHECK(given.has_value() == ptrace_scope().has_value());
    CHECK(consent.give(-1));
  }

  TEST_CASE("one engine of a process at a time may consent") {
    if (!ptrace_scope()) PEGA_SKIP("this kernel has no Yama");
    const Child child;
    const ReadConsent first = kernel_read_consent();
    std::optional<ReadConsent> second = kernel_read_consent();
    REQUIRE(second->give(child.pidfd.get()));
    CHECK(first.give(child.pidfd.get()).error().code == Errc::kBusy);
    second.reset();
    CHECK(first.give(child.pidfd.get()));
  }

  TEST_CASE("a child of fork() may consent although its parent does") {
    if (!ptrace_scope()) PEGA_SKIP("this kernel has no Yama");
    const Child reader;
    const ReadConsent consent = kernel_read_consent();
    REQUIRE(consent.give(reader.pidfd.get()));
    const pid_t child = ::fork();
    if (child == 0) ::_exit(kernel_read_consent().give(reader.pidfd.get()) ? 0 : 1);
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
}

}  // namespace
}  // namespace pegaflow
