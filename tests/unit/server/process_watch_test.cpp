#include "server/rpc/process_watch.h"

#include <csignal>

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <kj/async-io.h>

namespace pegaflow::server {
namespace {

UniqueFd pidfd_of(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

/// A child that waits to be killed.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ == 0) {
      for (;;) ::pause();
    }
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void end() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

TEST_SUITE("ProcessWatch") {
  TEST_CASE("it calls back once when the process is killed, and not before") {
    auto io = kj::setupAsyncIo();
    Child child;
    auto gone = kj::newPromiseAndFulfiller<void>();
    const auto watch =
        ProcessWatch::start(io.unixEventPort, pidfd_of(child.pid()), {.uid = 0, .pid = child.pid()},
                            [&]() { gone.fulfiller->fulfill(); });
    REQUIRE(watch);
    CHECK_FALSE(gone.promise.poll(io.waitScope));

    child.end();

    gone.promise.wait(io.waitScope);
  }

  TEST_CASE("a watch that ends before the process does not call back") {
    auto io = kj::setupAsyncIo();
    Child child;
    bool fired = false;
    auto watch =
        ProcessWatch::start(io.unixEventPort, pidfd_of(child.pid()), {}, [&]() { fired = true; });
    REQUIRE(watch);
    watch->reset();

    child.end();
    io.waitScope.poll();

    CHECK_FALSE(fired);
  }

  TEST_CASE("an invalid pidfd, that of another process, or of an ended one is refused") {
    auto io = kj::setupAsyncIo();
    const auto code = [&](UniqueFd fd, const Peer& peer) {
      const auto watch = ProcessWatch::start(io.unixEventPort, std::move(fd), peer, []() {});
      REQUIRE_FALSE(watch);
      return watch.error().code;
    };
    CHECK(code(UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)), {}) == Errc::kRefused);
    Child child;
    CHECK(code(pidfd_of(child.pid()), {.uid = 0, .pid = ::getpid()}) == Errc::kRefused);
    UniqueFd ended = pidfd_of(child.pid());
    child.end();
    CHECK(code(std::move(ended), {}) == Errc::kRefused);
  }
}

}  // namespace
}  // namespace pegaflow::server
