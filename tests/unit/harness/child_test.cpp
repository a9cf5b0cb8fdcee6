#include "harness/child.h"

#include <filesystem>

#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>

namespace pegaflow::harness {
namespace {

constexpr std::string_view kSmaps =
    "55a0-55b0 r-xp 00000000 08:01 42 /usr/bin/pegaflow-server\n"
    "Size:                 64 kB\n"
    "Rss:                  40 kB\n"
    "VmFlags: rd ex mr mw me\n"
    "7f00-7f90 rw-s 00000000 00:01 7 /memfd:pegaflow-pool (deleted)\n"
    "Rss:                1024 kB\n"
    "7fa0-7fb0 rw-p 00000000 00:00 0\n"
    "Rss:                   8 kB\n";

TEST_SUITE("child") {
  TEST_CASE("resident bytes are divided by the name of their mapping") {
    const Resident resident = sum_smaps(kSmaps, "memfd:pegaflow-pool").value();
    CHECK(resident.pool_bytes == 1024 * 1024);
    CHECK(resident.beside_bytes == 48 * 1024);
  }

  TEST_CASE("malformed smaps are an error, not a smaller sum") {
    const std::string text(kSmaps);
    const auto without = [&](std::string_view line) {
      std::string shorter = text;
      shorter.erase(shorter.find(line), line.size());
      return sum_smaps(shorter, "pool");
    };
    CHECK(without("Rss:                  40 kB\n").error().code == Errc::kCorrupt);
    CHECK(without("Rss:                   8 kB\n").error().code == Errc::kCorrupt);
    CHECK(sum_smaps("55a0-55b0 r-xp 0 08:01 42 x\nRss: none\n", "pool").error().code ==
          Errc::kCorrupt);
  }

  TEST_CASE("the smaps of this process can be summed") {
    const Resident resident = resident_of(::getpid(), "no such mapping").value();
    CHECK(resident.pool_bytes == 0);
    CHECK(resident.beside_bytes > 100 * 1024);
  }

  TEST_CASE("an ended process has no memory and no threads") {
    Child child = Child::start({.command = {"/bin/true"}, .log_file = {}}).value();
    const pid_t pid = child.pid();
    child.kill();
    CHECK_FALSE(resident_of(pid, "pool"));
    CHECK_FALSE(voluntary_switches(pid));
  }

  TEST_CASE("a child runs until it is killed, and its output goes to the log") {
    const TemporaryDirectory directory = TemporaryDirectory::create().value();
    const std::string log = directory.path() + "/log";
    Child child =
        Child::start({.command = {"/bin/sh", "-c", "echo out; echo err >&2; cat"}, .log_file = log})
            .value();
    REQUIRE(child.pid() > 0);
    child.kill();
    CHECK_FALSE(child.running());
    CHECK(std::filesystem::exists(log));
  }

  TEST_CASE("stop() fails for a child that ends with a status or not at all") {
    // Each child reports through the inherited descriptor that it is ready, and then reads a FIFO
    // without a writer. No `<(...)` in the loop: bash may receive a signal while it parses that.
    const TemporaryDirectory directory = TemporaryDirectory::create().value();
    const std::string silent = directory.path() + "/silent";
    REQUIRE(::mkfifo(silent.c_str(), 0600) == 0);
    const auto start = [&](const std::string& trap) {
      int ends[2];
      REQUIRE(::pipe(ends) == 0);
      const UniqueFd reader(ends[0]);
      UniqueFd writer(ends[1]);
      const std::string number = std::to_string(writer.get());
      const std::string script =
          "trap '" + trap + "' TERM; exec 9<>$2; echo >&$1; while :; do read -t 1 -u 9; done";
      Child child = Child::start({.command = {"/bin/bash", "-c", script, "sh", number, silent},
                                  .log_file = {},
                                  .inherited_fd = writer.get()})
                        .value();
      writer.reset();
      char byte = 0;
      REQUIRE(::read(reader.get(), &byte, 1) == 1);
      return child;
    };
    Child good = start("exit 0");
    CHECK(good.stop(std::chrono::seconds(60)));
    Child bad = start("exit 3");
    CHECK(bad.stop(std::chrono::seconds(60)).error().code == Errc::kInternal);
    Child deaf = start("");
    CHECK(deaf.stop(std::chrono::milliseconds(50)).error().code == Errc::kTimeout);
  }

  TEST_CASE("CPU time and wake-ups of a child are those of the kernel") {
    const Child child = Child::start({.command = {"/bin/sleep", "100"}, .log_file = {}}).value();
    CHECK(child.running());
    CHECK(child.cpu_time().value() >= Duration::zero());
    CHECK(voluntary_switches(child.pid()));
    CHECK(voluntary_switches(child.pid(), child.pid()).value() == 0);
  }

  TEST_CASE("a missing program cannot be started") {
    CHECK_FALSE(Child::start({.command = {"/nonexistent/program"}, .log_file = {}}));
  }

  TEST_CASE("a temporary directory is removed with its contents") {
    std::string path;
    {
      const TemporaryDirectory directory = TemporaryDirectory::create().value();
      path = directory.path();
      std::filesystem::create_directory(path + "/below");
      CHECK(std::filesystem::exists(path));
    }
    CHECK_FALSE(std::filesystem::exists(path));
  }
}

}  // namespace
}  // namespace pegaflow::harness
