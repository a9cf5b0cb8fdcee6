#include "base/os/pidfd.h"

#include <csignal>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"

namespace pegaflow {
namespace {

/// Leaves this process so many descriptors.
class FreeDescriptors {
 public:
  explicit FreeDescriptors(std::size_t count) {
    ::getrlimit(RLIMIT_NOFILE, &former_);
    const rlimit low{.rlim_cur = 64, .rlim_max = former_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &low);
    for (UniqueFd fd; fd = UniqueFd(::dup(STDERR_FILENO)), fd;) taken_.push_back(std::move(fd));
    taken_.resize(taken_.size() - count);
  }
  ~FreeDescriptors() { ::setrlimit(RLIMIT_NOFILE, &former_); }
  FreeDescriptors(const FreeDescriptors&) = delete;
  FreeDescriptors& operator=(const FreeDescriptors&) = delete;

 private:
  rlimit former_{};
  std::vector<UniqueFd> taken_;
};

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
    CHECK(own_number_of_pidfd(STDERR_FILENO).error().code == Errc::kRefused);
  }

  TEST_CASE("a process without free descriptors learns that, and its own number with two") {
    const UniqueFd own(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    for (const std::size_t count : {0, 1}) {
      const FreeDescriptors free(count);
      CHECK(own_number_of_pidfd(own.get()).error().code == Errc::kBusy);
    }
    const FreeDescriptors free(2);
    CHECK(own_number_of_pidfd(own.get()) == ::getpid());
  }
}

}  // namespace
}  // namespace pegaflow
