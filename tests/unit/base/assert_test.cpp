#include "base/assert.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

TEST_SUITE("PEGA_ASSERT") {
  TEST_CASE("a broken invariant throws where a ThrowOnAssert lives, and names the values") {
    const ThrowOnAssert guard;
    try {
      PEGA_ASSERT(1 + 1 == 3, "{} of {}", 5, 4);
      FAIL("nothing was thrown");
    } catch (const BrokenInvariant& broken) {
      const std::string text = broken.what();
      CHECK(text.find("1 + 1 == 3") != std::string::npos);
      CHECK(text.find("5 of 4") != std::string::npos);
      CHECK(text.find("assert_test.cpp") != std::string::npos);
    }
  }

  TEST_CASE("without one it aborts the process") {
    const pid_t child = fork();
    if (child == 0) {
      std::signal(SIGABRT, SIG_DFL);  // doctest has a handler of its own.
      if (std::freopen("/dev/null", "w", stderr) == nullptr) std::_Exit(1);
      PEGA_ASSERT(false, "on purpose");
      std::_Exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGABRT);
  }
}

}  // namespace
}  // namespace pegaflow
