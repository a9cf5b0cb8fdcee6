// Which UCX is loaded. A process has one, so each case that loads one runs in a child.
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "harness/child.h"
#include "tests/support/forked.h"
#include "tests/support/skip.h"
#include "transport/ucx/ucx_fabric.h"

namespace pegaflow::testing {
namespace {

namespace fs = std::filesystem;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The installed library. Loads it without PegaFlow: only in a child.
fs::path installed() {
  void* const library = ::dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error("UCX is not installed");
  Dl_info info{};
  if (::dladdr(::dlsym(library, "ucp_get_version"), &info) == 0) {
    throw std::runtime_error("the installed library has no file");
  }
  return fs::canonical(info.dli_fname);
}

/// Runs `body` with the installed library's path in a child. Returns its error; empty: none.
std::string in_child(const std::function<void(const fs::path&)>& body) {
  try {
    const Forked child([&] { body(installed()); });
  } catch (const std::runtime_error& problem) {
    return problem.what();
  }
  return {};
}

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

constexpr std::string_view kNoLibrary =
    "not a library, but long enough to have the header of one ...........";

/// A FIFO that contains no library. Its own writer keeps it open, so that a process that reads it
/// does not wait for one.
class FilledFifo {
 public:
  explicit FilledFifo(std::string path) : path_(std::move(path)) {
    require(::mkfifo(path_.c_str(), 0600) == 0, "mkfifo " + path_);
    fd_ = ::open(path_.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
    require(fd_ >= 0, "open " + path_);
    const std::string text(kBytes, '.');
    require(::write(fd_, text.data(), text.size()) == kBytes, "write to " + path_);
  }
  ~FilledFifo() { ::close(fd_); }
  FilledFifo(const FilledFifo&) = delete;
  FilledFifo& operator=(const FilledFifo&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool is_untouched() const {
    int bytes = 0;
    return ::ioctl(fd_, FIONREAD, &bytes) == 0 && bytes == kBytes;
  }

 private:
  static constexpr int kBytes = 4096;  ///< More than the loader reads at once.
  std::string path_;
  int fd_ = -1;
};

bool is_mapped(const fs::path& file) {
  std::ifstream maps("/proc/self/maps");
  const std::string text{std::istreambuf_iterator<char>(maps), {}};
  return has(text, file.string());
}

#define PEGA_SKIP_WITHOUT_UCX() \
  if (!in_child([](const fs::path&) {}).empty()) PEGA_SKIP("UCX is not installed")

TEST_SUITE("the UCX library") {
  TEST_CASE("a file that is missing is refused with its name and the remedy") {
    const auto none = UcxFabric::load_library("/nonexistent/libucp.so.0");
    REQUIRE_FALSE(none);
    CHECK(none.error().code == Errc::kRefused);
    CHECK(none.error().detail ==
          "UCX: /nonexistent/libucp.so.0: No such file or directory; name the file libucp.so.0 of "
          "UCX 1.13 or newer with --ucx-library or PEGA_UCX_LIBRARY");
  }

  TEST_CASE("an invalid library is refused with its name") {
    const auto place = harness::TemporaryDirectory::create().value();
    const std::string text = place.path() + "/libucp.so.0";
    std::ofstream(text) << kNoLibrary;
    const auto none = UcxFabric::load_library(text);
    REQUIRE_FALSE(none);
    CHECK(none.error().code == Errc::kRefused);
    CHECK(has(none.error().detail, "UCX: " + text + " cannot be loaded: "));
    CHECK(has(none.error().detail, "--ucx-library"));
  }

  TEST_CASE("a FIFO, a directory and a device are refused with their names and not opened") {
    const auto place = harness::TemporaryDirectory::create().value();
    const FilledFifo fifo(place.path() + "/libucp.so.0");
    for (const std::string& file : {fifo.path(), place.path(), std::string("/dev/null")}) {
      const auto none = UcxFabric::load_library(file);
      REQUIRE_FALSE(none);
      CHECK(none.error().code == Errc::kRefused);
      CHECK(none.error().detail == "UCX: " + file +
                                       " is not a regular file; name the file libucp.so.0 of UCX "
                                       "1.13 or newer with --ucx-library or PEGA_UCX_LIBRARY");
    }
    CHECK(fifo.is_untouched());
  }

  TEST_CASE("a FIFO beside the named library is not opened") {
    const auto place = harness::TemporaryDirectory::create().value();
    const fs::path library = fs::path(place.path()) / "libucp.so.0";
    fs::copy_file(PEGA_OLD_UCP, library);
    const FilledFifo fifo(place.path() + "/libucs.so.0");
    const auto old = UcxFabric::load_library(library.string());
    REQUIRE_FALSE(old);
    CHECK(has(old.error().detail, "is the fake, which is too old"));
    CHECK(fifo.is_untouched());
  }

  TEST_CASE("another library is refused: it is no libucp") {
    Dl_info info{};
    REQUIRE(::dladdr(::dlsym(RTLD_DEFAULT, "__gxx_personality_v0"), &info) != 0);
    const std::string file = info.dli_fname;
    const auto none = UcxFabric::load_library(file);
    REQUIRE_FALSE(none);
    CHECK(none.error().code == Errc::kRefused);
    CHECK(has(none.error().detail, "UCX: " + file + " is no libucp, it has no ucp_config_read"));
  }

  TEST_CASE("a UCX that is too old is refused with its version") {
    const auto old = UcxFabric::load_library(PEGA_OLD_UCP);
    REQUIRE_FALSE(old);
    CHECK(old.error().code == Errc::kRefused);
    CHECK(has(old.error().detail, PEGA_OLD_UCP " is the fake, which is too old; name the file"));
  }

  TEST_CASE("a UCX without the functions is refused with the first that is missing") {
    const auto bare = UcxFabric::load_library(PEGA_BARE_UCP);
    REQUIRE_FALSE(bare);
    CHECK(bare.error().code == Errc::kRefused);
    CHECK(
        has(bare.error().detail, PEGA_BARE_UCP " is the fake and has no function ucp_config_read"));
  }

  TEST_CASE("a library that is named by a link is used where it lies") {
    PEGA_SKIP_WITHOUT_UCX();
    const auto place = harness::TemporaryDirectory::create().value();
    CHECK(in_child([&](const fs::path& real) {
            const fs::path link = fs::path(place.path()) / "any-name.so";
            fs::create_symlink(real, link);
            const auto loaded = UcxFabric::load_library(link.string());
            require(loaded.has_value(), loaded ? "" : loaded.error().detail);
            require(loaded->file == real.string(), loaded->file);
            require(loaded->version.starts_with("1."), loaded->version);
          }) == "");
  }

  TEST_CASE("UCX's other libraries beside the named one are used, not the installed ones") {
    PEGA_SKIP_WITHOUT_UCX();
    const auto place = harness::TemporaryDirectory::create().value();
    const fs::path copy = place.path();
    // The copy is made in one child, and loaded in another, which has not loaded the original.
    REQUIRE(in_child([&](const fs::path& real) {
              for (const char* const name :
                   {"libucp.so.0", "libuct.so.0", "libucs.so.0", "libucm.so.0"}) {
                fs::copy_file(fs::canonical(real.parent_path() / name), copy / name);
              }
            }) == "");
    std::string why;
    try {
      const Forked child([&] {
        const auto loaded = UcxFabric::load_library((copy / "libucp.so.0").string());
        require(loaded.has_value(), loaded ? "" : loaded.error().detail);
        require(loaded->file == (copy / "libucp.so.0").string(), loaded->file);
        for (const char* const name : {"libuct.so.0", "libucs.so.0", "libucm.so.0"}) {
          require(is_mapped(copy / name), std::string(name) + " of the copy is not loaded");
        }
      });
    } catch (const std::runtime_error& problem) {
      why = problem.what();
    }
    CHECK(why == "");
  }

  TEST_CASE("a process that has loaded one UCX refuses another") {
    PEGA_SKIP_WITHOUT_UCX();
    CHECK(in_child([](const fs::path& real) {
            const auto first = UcxFabric::load_library("");
            require(first.has_value(), first ? "" : first.error().detail);
            const SteadyClock clock;
            const auto again = UcxFabric::load_library(first->file);
            require(again.has_value(), "the same library by its name is refused");
            const auto other = UcxFabric::create(
                {.rails = {"lo"}, .library = PEGA_OLD_UCP, .sockets = true}, clock, [](auto&&) {});
            require(!other.has_value(), "another library is accepted");
            require(other.error().code == Errc::kRefused, other.error().detail);
            require(has(other.error().detail, "this process has loaded " + first->file),
                    other.error().detail);
            (void)real;
          }) == "");
  }
}

}  // namespace
}  // namespace pegaflow::testing
