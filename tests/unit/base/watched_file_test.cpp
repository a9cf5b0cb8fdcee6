#include "base/os/watched_file.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

TEST_SUITE("watched_file") {
  TEST_CASE("each change, disappearance and appearance of a file is detected once") {
    std::string folder = "/tmp/pega-watched-XXXXXX";
    REQUIRE(::mkdtemp(folder.data()) != nullptr);
    const std::string path = folder + "/file";
    const auto write = [&](const char* text) { std::ofstream(path) << text; };
    write("one");
    WatchedFile file(path);
    CHECK_FALSE(file.has_changed());
    write("longer");
    CHECK(file.has_changed());
    CHECK_FALSE(file.has_changed());
    // Replaced by one of the same length, which has another inode.
    std::ofstream(path + ".new") << "LONGER";
    REQUIRE(std::rename((path + ".new").c_str(), path.c_str()) == 0);
    CHECK(file.has_changed());
    REQUIRE(std::remove(path.c_str()) == 0);
    CHECK(file.has_changed());
    CHECK_FALSE(file.has_changed());
    write("back");
    CHECK(file.has_changed());
    REQUIRE(std::remove(path.c_str()) == 0);
    REQUIRE(std::remove(folder.c_str()) == 0);
  }

  TEST_CASE("no file never changes") { CHECK_FALSE(WatchedFile("").has_changed()); }
}

}  // namespace
}  // namespace pegaflow
