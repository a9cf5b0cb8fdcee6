#include "client/socket_path.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

namespace fs = std::filesystem;

/// Two temporary directories in the place of /run/pegaflow and $XDG_RUNTIME_DIR.
struct Directories {
  Directories() {
    char name[] = "/tmp/pegaflow-test-XXXXXX";
    root = ::mkdtemp(name);
    choice.system = root + "/system";
    choice.user = root + "/user/pegaflow";
  }
  ~Directories() { fs::remove_all(root); }
  static void put(const std::string& path) {
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path) << "socket";
  }
  std::string root;
  RuntimeDirectories choice;
};

TEST_SUITE("default_socket_path") {
  TEST_CASE("an explicit directory decides") {
    Directories d;
    d.choice.explicit_directory = "/x";
    CHECK(default_socket_path(50055, d.choice) == "/x/50055.sock");
  }

  TEST_CASE("an existing socket is found in either directory") {
    Directories d;
    Directories::put(d.choice.user + "/7.sock");
    CHECK(default_socket_path(7, d.choice) == d.choice.user + "/7.sock");
    Directories::put(d.choice.system + "/7.sock");
    CHECK(default_socket_path(7, d.choice) == d.choice.system + "/7.sock");
  }

  TEST_CASE("without a socket the path is where this user's server would create it") {
    Directories d;
    CHECK(default_socket_path(7, d.choice) == d.choice.user + "/7.sock");
    fs::create_directories(d.choice.system);
    CHECK(default_socket_path(7, d.choice) == d.choice.system + "/7.sock");
    d.choice.user.clear();
    fs::remove_all(d.choice.system);
    CHECK(default_socket_path(7, d.choice) == d.choice.system + "/7.sock");
  }
}

}  // namespace
}  // namespace pegaflow
