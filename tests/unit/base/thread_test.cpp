#include "base/os/thread.h"

#include <array>
#include <string>

#include <pthread.h>
#include <signal.h>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

TEST_SUITE("start_thread") {
  TEST_CASE("a thread has its name and all signals blocked, and its parent's mask is unchanged") {
    sigset_t mine_before;
    pthread_sigmask(SIG_SETMASK, nullptr, &mine_before);
    std::array<int, 3> blocked{};

    Result<std::thread> thread = start_thread("pega-test", [&] {
      sigset_t mask;
      pthread_sigmask(SIG_SETMASK, nullptr, &mask);
      blocked = {sigismember(&mask, SIGINT), sigismember(&mask, SIGTERM),
                 sigismember(&mask, SIGUSR1)};
    });

    REQUIRE(thread);
    thread->join();
    CHECK(blocked == std::array<int, 3>{1, 1, 1});
    sigset_t mine_after;
    pthread_sigmask(SIG_SETMASK, nullptr, &mine_after);
    CHECK(sigismember(&mine_after, SIGINT) == sigismember(&mine_before, SIGINT));
  }
}

}  // namespace
}  // namespace pegaflow
