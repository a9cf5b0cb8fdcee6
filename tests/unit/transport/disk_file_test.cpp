// The file of a disk: creation, permissions, lock, size, and registered memory.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "harness/child.h"
#include "tests/support/disk_inbox.h"
#include "tests/support/seed.h"
#include "tests/support/skip.h"
#include "transport/disk/open_disk.h"

namespace pegaflow::testing {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kPage = Disk::kAlignment;

/// A scratch directory, and disks in it.
struct Bench {
  [[nodiscard]] std::string path(const std::string& name) const {
    return directory.path() + "/" + name;
  }
  Result<std::unique_ptr<Disk>> open(const std::string& at, std::uint64_t size = kMiB,
                                     Duration lock_wait = {}) {
    return open_disk({.path = at, .size_bytes = size, .lock_wait = lock_wait}, inbox.sink());
  }
  void make_file(const std::string& at, const std::string& content, unsigned mode) const {
    std::ofstream(at) << content;
    REQUIRE(::chmod(at.c_str(), mode) == 0);
  }
  static std::string content_of(const std::string& at) {
    std::ostringstream text;
    text << std::ifstream(at).rdbuf();
    return text.str();
  }

  harness::TemporaryDirectory directory = harness::TemporaryDirectory::create().value();
  DiskInbox inbox;
};

TEST_SUITE("disk file") {
  TEST_CASE("an absent file is allocated whole, for its owner alone") {
    Bench bench;
    const mode_t before = ::umask(0);
    const auto disk = bench.open(bench.path("cache"), 3 * kMiB);
    ::umask(before);

    REQUIRE_MESSAGE(disk, to_string(disk.error()));
    struct stat info {};
    REQUIRE(::stat(bench.path("cache").c_str(), &info) == 0);
    CHECK((info.st_mode & 07777U) == 0600);
    CHECK(info.st_size == 3 * kMiB);
    CHECK(static_cast<std::uint64_t>(info.st_blocks) * 512 >= 3 * kMiB);
    CHECK((*disk)->attributes().is_new);
    CHECK((*disk)->attributes().path == bench.path("cache"));
  }

  TEST_CASE("in a directory the file has a fixed name") {
    Bench bench;
    const auto disk = bench.open(bench.directory.path());
    REQUIRE(disk);
    CHECK((*disk)->attributes().path == bench.path("pegaflow.ssd"));
  }

  TEST_CASE("a file with content keeps its size and its bytes") {
    Bench bench;
    const std::string content(10'000, 'x');
    bench.make_file(bench.path("foreign"), content, 0600);
    {
      const auto disk = bench.open(bench.path("foreign"), 4 * kMiB);
      REQUIRE(disk);
      CHECK_FALSE((*disk)->attributes().is_new);
      CHECK((*disk)->size_bytes() == 2 * kPage);
      const AlignedMemory memory(3 * kPage);
      CHECK((*disk)->submit({.ticket = 1, .memory = {memory.span()}}).error().code ==
            Errc::kInvalidArgument);
      REQUIRE((*disk)->submit({.ticket = 1, .memory = {memory.part(0, 2 * kPage)}}));
      CHECK_FALSE(bench.inbox.take(1).error);
      CHECK(std::memcmp(memory.span().data(), content.data(), 2 * kPage) == 0);
    }
    CHECK(Bench::content_of(bench.path("foreign")) == content);

    bench.make_file(bench.path("tiny"), "tiny", 0600);
    const auto tiny = bench.open(bench.path("tiny"));
    REQUIRE(tiny);
    CHECK((*tiny)->size_bytes() == 0);
    CHECK_FALSE((*tiny)->attributes().is_new);
    CHECK(Bench::content_of(bench.path("tiny")) == "tiny");
  }

  TEST_CASE("a file that others may access, and other things than files, are refused by name") {
    Bench bench;
    bench.make_file(bench.path("open"), "content", 0644);
    REQUIRE(::mkfifo(bench.path("fifo").c_str(), 0600) == 0);
    for (const std::string& path :
         {bench.path("open"), bench.path("fifo"), std::string("/dev/null")}) {
      const auto disk = bench.open(path);
      REQUIRE_FALSE(disk);
      CHECK(disk.error().code == Errc::kRefused);
      CHECK(disk.error().detail.find(path) != std::string::npos);
    }
    CHECK(Bench::content_of(bench.path("open")) == "content");
  }

  TEST_CASE("a file of another user is refused, with the fix") {
    if (::geteuid() != 0) PEGA_SKIP("only root can give a file to another user");
    Bench bench;
    bench.make_file(bench.path("theirs"), "content", 0600);
    REQUIRE(::chown(bench.path("theirs").c_str(), 65534, static_cast<gid_t>(-1)) == 0);
    const auto disk = bench.open(bench.path("theirs"));
    REQUIRE_FALSE(disk);
    CHECK(disk.error().code == Errc::kRefused);
    CHECK(disk.error().detail.find("chown 0 " + bench.path("theirs")) != std::string::npos);
  }

  TEST_CASE("options out of their range, and a folder that does not exist, are invalid") {
    Bench bench;
    const auto code = [&](const DiskOptions& options) {
      return open_disk(options, bench.inbox.sink()).error().code;
    };
    CHECK(code({.path = "", .size_bytes = kMiB}) == Errc::kInvalidArgument);
    CHECK(code({.path = bench.path("a"), .size_bytes = 0}) == Errc::kInvalidArgument);
    CHECK(code({.path = bench.path("a"), .size_bytes = kMiB + 512}) == Errc::kInvalidArgument);
    CHECK(code({.path = bench.path("a"), .size_bytes = kMiB, .threads = 0}) ==
          Errc::kInvalidArgument);
    CHECK(code({.path = bench.path("a"), .size_bytes = kMiB, .threads = 65}) ==
          Errc::kInvalidArgument);
    CHECK_FALSE(std::filesystem::exists(bench.path("a")));
    const auto absent = bench.open(bench.path("none/cache"));
    CHECK(absent.error().code == Errc::kInvalidArgument);
    CHECK(absent.error().detail ==
          "open " + bench.path("none/cache") + ": its folder does not exist");
    CHECK(parse_disk_backend("rust").error().detail == "'rust' is not auto, uring or threads");
    CHECK(parse_disk_backend("threads") == DiskBackend::kThreads);
  }

  TEST_CASE("a second opener is refused with the holder's pid, and admitted after the first") {
    Bench bench;
    auto first = bench.open(bench.path("cache"));
    REQUIRE(first);

    const auto second = bench.open(bench.path("cache"), kMiB, std::chrono::milliseconds(20));

    REQUIRE_FALSE(second);
    CHECK(second.error().code == Errc::kBusy);
    CHECK(second.error().detail.find(fmt::format("process {}", ::getpid())) != std::string::npos);
    CHECK(std::filesystem::file_size(bench.path("cache")) == kMiB);
    first->reset();
    CHECK(bench.open(bench.path("cache")));
  }

  TEST_CASE("registered memory is used like any other, also across two registered parts") {
    if (!probe_uring().allowed) PEGA_SKIP(probe_uring().reason);
    Bench bench;
    std::mt19937_64 random(seed());
    const AlignedMemory memory(4 * kMiB);
    memory.fill(random);
    const auto disk = open_disk({.path = bench.path("cache"),
                                 .size_bytes = 8 * kMiB,
                                 .backend = DiskBackend::kUring,
                                 .huge_memory = {memory.part(kMiB, kMiB), memory.part(0, kMiB)}},
                                bench.inbox.sink());
    REQUIRE(disk);
    // Nothing where RLIMIT_MEMLOCK forbids it.
    const std::uint64_t registered = (*disk)->attributes().registered_bytes;
    CHECK((registered == 2 * kMiB || registered == 0));
    const AlignedMemory target(4 * kMiB);
    const std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges = {
        {0, kMiB},
        {kMiB, kMiB},
        {kMiB - 8 * kPage, 16 * kPage},
        {2 * kMiB - kPage, kMiB},
        {3 * kMiB, kMiB}};
    for (const auto& [offset, size] : ranges) {
      const auto source = memory.part(offset, size);
      const std::vector<std::byte> before(source.begin(), source.end());
      REQUIRE((*disk)->submit(
          {.ticket = 1, .operation = Disk::Operation::kWrite, .offset = kMiB, .memory = {source}}));
      REQUIRE_FALSE(bench.inbox.take(1).error);
      REQUIRE((*disk)->submit({.ticket = 2, .offset = kMiB, .memory = {target.part(0, size)}}));
      REQUIRE_FALSE(bench.inbox.take(2).error);
      CHECK(std::memcmp(target.span().data(), before.data(), size) == 0);
      std::fill(source.begin(), source.end(), std::byte{0});
      REQUIRE((*disk)->submit({.ticket = 3, .offset = kMiB, .memory = {source}}));
      REQUIRE_FALSE(bench.inbox.take(3).error);
      CHECK(std::memcmp(source.data(), before.data(), size) == 0);
    }
  }

  TEST_CASE("a file that is cut by another program fails its reads") {
    Bench bench;
    const auto disk = bench.open(bench.path("cache"));
    REQUIRE(disk);
    REQUIRE(::truncate(bench.path("cache").c_str(), 3 * kPage) == 0);
    const AlignedMemory memory(4 * kPage);

    REQUIRE((*disk)->submit({.ticket = 1, .offset = 0, .memory = {memory.span()}}));

    const Disk::Completion completion = bench.inbox.take(1);
    REQUIRE(completion.error);
    CHECK(completion.error->code == Errc::kIo);
    CHECK(completion.error_number == 0);
    CHECK(completion.error->detail ==
          "read of 16384 bytes at 0 in " + bench.path("cache") + ": only 12288 bytes");
  }
}

}  // namespace
}  // namespace pegaflow::testing
