#pragma once
/// \file
/// Reads of a server's disks that hang while a test says so: see hanging_reads.cpp.

#include <fstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "tests/support/server_process.h"

namespace pegaflow::testing {

class HangingReads {
 public:
  /// Only reads of files whose path ends with `of`; empty: all.
  explicit HangingReads(std::string of = {}) : of_(std::move(of)) {
    std::ofstream(path()).flush();
    file_ = UniqueFd(::open(path().c_str(), O_RDONLY | O_CLOEXEC));
    REQUIRE(file_.get() >= 0);
  }
  [[nodiscard]] std::string path() const { return (directory_.path() / "lock").string(); }
  /// For ServerProcess::Options::command_prefix, of a server with `--ssd-io threads`.
  [[nodiscard]] std::vector<std::string> command() const {
    return {"env", "LD_PRELOAD=" PEGA_HANGING_READS, "PEGA_TEST_READS_HANG=" + path(),
            "PEGA_TEST_READS_HANG_OF=" + of_};
  }
  void begin() const { REQUIRE(::flock(file_.get(), LOCK_EX) == 0); }
  void end() const { REQUIRE(::flock(file_.get(), LOCK_UN) == 0); }

 private:
  std::string of_;
  TemporaryDirectory directory_;
  UniqueFd file_;
};

}  // namespace pegaflow::testing
