#include "base/runtime_directories.h"

#include <cstdlib>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

TEST_SUITE("RuntimeDirectories") {
  TEST_CASE("the environment names the explicit and the user's directory") {
    ::setenv("PEGAFLOW_RUNTIME_DIR", "/x", 1);
    ::setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);

    const RuntimeDirectories directories = RuntimeDirectories::from_environment();

    CHECK(directories.explicit_directory == "/x");
    CHECK(directories.system == "/run/pegaflow");
    CHECK(directories.user == "/run/user/7/pegaflow");
  }

  TEST_CASE("without an environment there is only the system's directory") {
    ::unsetenv("PEGAFLOW_RUNTIME_DIR");
    ::unsetenv("XDG_RUNTIME_DIR");

    const RuntimeDirectories directories = RuntimeDirectories::from_environment();

    CHECK(directories.explicit_directory.empty());
    CHECK(directories.user.empty());
  }
}

}  // namespace
}  // namespace pegaflow
