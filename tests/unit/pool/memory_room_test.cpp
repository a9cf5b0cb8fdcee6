#include "engine/pool/memory_room.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

/// A machine with 1,000 MiB free of 4,000, whose files a test writes.
class Machine {
 public:
  Machine() {
    char name[] = "/tmp/pega-room-XXXXXX";
    root_ = ::mkdtemp(name);
    write("proc/meminfo",
          "MemTotal:        4096000 kB\nMemFree:  1 kB\nMemAvailable:    1024000 kB\n"
          "HugePages_Total:      10\nHugePages_Free:        7\nHugePages_Rsvd:        2\n"
          "Hugepagesize:       2048 kB\n");
  }
  ~Machine() { fs::remove_all(root_); }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  [[nodiscard]] Result<engine::MemoryRoom> room() const {
    return engine::memory_room(root_ / "proc", root_ / "cgroup");
  }
  [[nodiscard]] fs::path proc() const { return root_ / "proc"; }

 private:
  fs::path root_;
};

TEST_SUITE("memory_room") {
  TEST_CASE("without a cgroup MemAvailable is the limit") {
    const Machine machine;

    const auto room = machine.room();

    REQUIRE(room);
    CHECK(room->available_bytes == 1000 * kMiB);
    CHECK(room->possible_bytes == 4000 * kMiB);
    CHECK(room->limited_by == "MemAvailable");
  }

  TEST_CASE("a cgroup above ours limits it, and is named") {
    const Machine machine;
    machine.write("proc/self/cgroup", "0::/slice/engine\n");
    machine.write("cgroup/slice/engine/memory.max", "max\n");
    machine.write("cgroup/slice/engine/memory.current", "4096\n");
    machine.write("cgroup/slice/memory.max", std::to_string(600 * kMiB) + "\n");
    machine.write("cgroup/slice/memory.current", std::to_string(350 * kMiB) + "\n");

    const auto room = machine.room();

    REQUIRE(room);
    CHECK(room->available_bytes == 250 * kMiB);
    CHECK(room->possible_bytes == 600 * kMiB);
    CHECK(room->limited_by.ends_with("cgroup/slice"));
  }

  TEST_CASE("file pages that were not used lately count as free") {
    const Machine machine;
    machine.write("proc/self/cgroup", "0::/\n");
    machine.write("cgroup/memory.max", std::to_string(600 * kMiB));
    machine.write("cgroup/memory.current", std::to_string(590 * kMiB));
    machine.write("cgroup/memory.stat",
                  "anon 1\ninactive_file " + std::to_string(90 * kMiB) + "\nactive_file 5\n");

    const auto room = machine.room();

    REQUIRE(room);
    CHECK(room->available_bytes == 100 * kMiB);
  }

  TEST_CASE("the first version of cgroups is read too") {
    const Machine machine;
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n");
    machine.write("cgroup/memory/a/memory.limit_in_bytes", std::to_string(500 * kMiB));
    machine.write("cgroup/memory/a/memory.usage_in_bytes", std::to_string(100 * kMiB));

    const auto room = machine.room();

    REQUIRE(room);
    CHECK(room->available_bytes == 400 * kMiB);
  }

  TEST_CASE("a group that holds more than its limit leaves nothing") {
    const Machine machine;
    machine.write("proc/self/cgroup", "0::/\n");
    machine.write("cgroup/memory.max", std::to_string(10 * kMiB));
    machine.write("cgroup/memory.current", std::to_string(20 * kMiB));

    const auto room = machine.room();

    REQUIRE(room);
    CHECK(room->available_bytes == 0);
  }

  TEST_CASE("an unreadable meminfo is an error that names it") {
    const auto room = engine::memory_room("/nonexistent", "/nonexistent");

    REQUIRE_FALSE(room);
    CHECK(room.error().code == Errc::kIo);
    CHECK(room.error().detail.find("/nonexistent/meminfo") != std::string::npos);
    CHECK_FALSE(engine::huge_pages("/nonexistent"));
  }

  TEST_CASE("reserved huge pages are not free") {
    const Machine machine;

    const auto pages = engine::huge_pages(machine.proc());

    REQUIRE(pages);
    CHECK(pages->page_bytes == 2 * kMiB);
    CHECK(pages->free == 5);
    CHECK(pages->total == 10);
  }
}

}  // namespace
}  // namespace pegaflow
