#include "base/os/text_file.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <sys/stat.h>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

/// A directory that ends with the test.
class Scratch {
 public:
  Scratch() {
    std::string name = std::filesystem::temp_directory_path() / "text-file-XXXXXX";
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] std::string operator/(const char* name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

std::string why(const std::string& path) {
  const Result<std::string> text = read_text_file(path);
  REQUIRE_FALSE(text);
  CHECK(text.error().code == Errc::kInvalidArgument);
  return text.error().detail;
}

TEST_SUITE("text_file") {
  TEST_CASE("a file is read whole, through a symbolic link too") {
    const Scratch folder;
    const std::string content = std::string(100'000, 'x') + '\0' + "\r\nend";
    std::ofstream(folder / "file", std::ios::binary) << content;
    std::ofstream(folder / "empty").flush();
    std::filesystem::create_symlink("file", folder / "link");
    CHECK(read_text_file(folder / "link").value() == content);
    CHECK(read_text_file(folder / "empty").value().empty());
  }

  TEST_CASE("a path that is not a regular file is rejected without waiting") {
    const Scratch folder;
    const std::string pipe = folder / "pipe";
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    for (const std::string& path : {pipe, std::string("/dev/zero"), std::string("/dev/null")}) {
      CAPTURE(path);
      CHECK(why(path) == "cannot be read: it is not a regular file");
    }
    CHECK(why(folder / "") == "cannot be read: Is a directory");
    CHECK(why(folder / "none") == "cannot be read: No such file or directory");
  }

  TEST_CASE("a file above the limit is rejected, and one at the limit is not") {
    const Scratch folder;
    const std::string path = folder / "file";
    std::ofstream(path).flush();
    std::filesystem::resize_file(path, kMaxTextFileBytes);
    CHECK(read_text_file(path).value().size() == kMaxTextFileBytes);
    std::filesystem::resize_file(path, kMaxTextFileBytes + 1);
    CHECK(why(path) == "has more than 16777216 bytes");
  }
}

}  // namespace
}  // namespace pegaflow
