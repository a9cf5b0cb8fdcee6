// Disks on parts that fail: small and damaged file systems, refused system calls, killed processes.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "harness/child.h"
#include "tests/support/disk_inbox.h"
#include "tests/support/seed.h"
#include "tests/support/skip.h"
#include "transport/checksum.h"
#include "transport/disk/open_disk.h"

namespace pegaflow::testing {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

/// ext4 on a loop device, mounted in a namespace of this process, so that nothing is left behind.
class LoopFileSystem {
 public:
  explicit LoopFileSystem(std::uint64_t bytes) {
    if (::geteuid() != 0) {
      reason_ = "loop devices need root";
      return;
    }
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
      reason_ = "a mount namespace is not allowed";
      return;
    }
    REQUIRE(std::filesystem::create_directory(path()));
    const UniqueFd file(::open(backing().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    REQUIRE(::ftruncate(file.get(), static_cast<off_t>(bytes)) == 0);
    const std::string command = "PATH=/usr/sbin:/sbin:$PATH; mkfs.ext4 -q -b 4096 -m 0 " +
                                backing() + " && mount -o loop " + backing() + " " + path();
    if (std::system(command.c_str()) != 0) {
      reason_ = "ext4 cannot be mounted on a loop device";
      return;
    }
    is_mounted_ = true;
  }
  ~LoopFileSystem() {
    if (is_mounted_) ::umount2(path().c_str(), MNT_DETACH);
  }
  LoopFileSystem(const LoopFileSystem&) = delete;
  LoopFileSystem& operator=(const LoopFileSystem&) = delete;

  [[nodiscard]] const std::optional<std::string>& unavailable() const { return reason_; }
  [[nodiscard]] std::string path() const { return directory_.path() + "/mounted"; }
  [[nodiscard]] std::string backing() const { return directory_.path() + "/backing"; }

 private:
  harness::TemporaryDirectory directory_ = harness::TemporaryDirectory::create().value();
  std::optional<std::string> reason_;
  bool is_mounted_ = false;
};

/// disk_holder with its output; killed with this object.
class Holder {
 public:
  explicit Holder(const std::string& arguments)
      : output_(::popen(("exec " PEGA_DISK_HOLDER " " + arguments).c_str(), "r")) {
    REQUIRE(output_ != nullptr);
  }
  ~Holder() {
    if (pid_ > 0) ::kill(pid_, SIGKILL);
    finish();
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  std::string line() {
    std::string text(1024, '\0');
    if (std::fgets(text.data(), static_cast<int>(text.size()), output_) == nullptr) return {};
    text.resize(text.find('\n'));
    return text;
  }
  /// The pid is the output's first line.
  pid_t take_pid() {
    const std::string text = line();
    pid_ = std::atoi(text.c_str());
    REQUIRE_MESSAGE(pid_ > 0, text);
    return pid_;
  }
  /// Waits for the end, and returns the exit status or -signal.
  int finish() {
    if (output_ == nullptr) return status_;
    const int status = ::pclose(std::exchange(output_, nullptr));
    pid_ = 0;
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    return status_;
  }

 private:
  std::FILE* output_;
  pid_t pid_ = 0;
  int status_ = 0;
};

std::uint64_t digest(std::span<const std::byte> memory) { return PageChecksum::of(memory); }

TEST_SUITE("disk faults") {
  TEST_CASE("a file system that is too small is named with what is free, and nothing is left") {
    const LoopFileSystem small(16 * kMiB);
    if (small.unavailable()) PEGA_SKIP(*small.unavailable());
    DiskInbox inbox;
    DiskOptions options{.path = small.path(), .size_bytes = 64 * kMiB};

    const auto refused = open_disk(options, inbox.sink());

    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Errc::kOutOfCapacity);
    CHECK(refused.error().detail.find("no space left") != std::string::npos);
    CHECK(refused.error().detail.find("MiB are free") != std::string::npos);
    CHECK_FALSE(std::filesystem::exists(small.path() + "/pegaflow.ssd"));
    options.size_bytes = 4 * kMiB;
    const auto disk = open_disk(options, inbox.sink());
    REQUIRE_MESSAGE(disk, to_string(disk.error()));
    CHECK((*disk)->attributes().direct);
    CHECK((*disk)->resize(64 * kMiB).error().code == Errc::kOutOfCapacity);
    CHECK((*disk)->size_bytes() == 4 * kMiB);
    CHECK(std::filesystem::file_size(small.path() + "/pegaflow.ssd") == 4 * kMiB);
    CHECK((*disk)->resize(5 * kMiB));
  }

  TEST_CASE("a device that loses its end fails reads with EIO, and every request completes") {
    for (const DiskBackend backend : {DiskBackend::kAuto, DiskBackend::kThreads}) {
      CAPTURE(static_cast<int>(backend));
      const LoopFileSystem system(64 * kMiB);
      if (system.unavailable()) PEGA_SKIP(*system.unavailable());
      DiskInbox inbox;
      const auto disk = open_disk(
          {.path = system.path(), .size_bytes = 16 * kMiB, .backend = backend}, inbox.sink());
      REQUIRE_MESSAGE(disk, to_string(disk.error()));
      std::mt19937_64 random(seed());
      const AlignedMemory memory(16 * kMiB);
      memory.fill(random);
      REQUIRE((*disk)->submit(
          {.ticket = 0, .operation = Disk::Operation::kDurableWrite, .memory = {memory.span()}}));
      REQUIRE_FALSE(inbox.take(0).error);

      // What lies behind this place is gone; only the superblock and some tables are before it.
      std::filesystem::resize_file(system.backing(), kMiB / 4);
      for (std::uint64_t i = 0; i < 16; ++i) {
        REQUIRE((*disk)->submit(
            {.ticket = i, .offset = i * kMiB, .memory = {memory.part(i * kMiB, kMiB)}}));
      }

      for (std::uint64_t i = 0; i < 16; ++i) {
        const Disk::Completion completion = inbox.take(i);
        REQUIRE(completion.error);
        CHECK(completion.error->code == Errc::kIo);
        CHECK(completion.error_number == EIO);
        CHECK(completion.error->detail.find("Input/output error") != std::string::npos);
      }
      CHECK((*disk)->stats().reads.errors == 16);
    }
  }

  TEST_CASE("where io_uring is forbidden, threads are used and the reason is given") {
    const auto directory = harness::TemporaryDirectory::create().value();
    Holder holder("no-uring " + directory.path());
    const std::string line = holder.line();
    const int status = holder.finish();
    if (status == 77) PEGA_SKIP("the kernel has no filters of system calls");
    CHECK_MESSAGE(status == 0, line);
    CHECK(line.find("threads direct io_uring_setup: Operation not permitted; a seccomp profile") ==
          0);
  }

  TEST_CASE("where O_DIRECT is refused, the page cache is used") {
    const auto directory = harness::TemporaryDirectory::create().value();
    Holder holder("no-direct " + directory.path());
    const std::string line = holder.line();
    const int status = holder.finish();
    if (status == 77) PEGA_SKIP("the kernel has no filters of system calls");
    CHECK_MESSAGE(status == 0, line);
    CHECK(line.find(" buffered ") != std::string::npos);
  }

  TEST_CASE("the lock of a killed process is free only after its last byte has landed") {
    constexpr std::uint64_t kBytes = 96 * kMiB;
    for (const char* const backend : {"auto", "threads"}) {
      CAPTURE(backend);
      const auto directory = harness::TemporaryDirectory::create().value();
      std::mt19937_64 random(seed());
      DiskInbox inbox;
      const DiskOptions options{.path = directory.path(), .size_bytes = kBytes};
      {
        const auto disk = open_disk(options, inbox.sink());
        REQUIRE(disk);
        const AlignedMemory memory(kBytes);
        memory.fill(random);
        REQUIRE((*disk)->submit(
            {.ticket = 1, .operation = Disk::Operation::kWrite, .memory = {memory.span()}}));
        REQUIRE_FALSE(inbox.take(1).error);
      }
      // Without MFD_CLOEXEC: the holder inherits it.
      const UniqueFd shared(::memfd_create("pool", 0));  // NOLINT(android-cloexec-memfd-create)
      REQUIRE(::ftruncate(shared.get(), kBytes) == 0);
      void* const mapped =
          ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared.get(), 0);
      REQUIRE(mapped != MAP_FAILED);
      const std::span<std::byte> pool(static_cast<std::byte*>(mapped), kBytes);

      Holder holder(
          fmt::format("flood {} {} {} {}", backend, directory.path(), shared.get(), kBytes));
      const pid_t pid = holder.take_pid();
      CHECK(
          open_disk({.path = directory.path(), .size_bytes = kBytes, .lock_wait = {}}, inbox.sink())
              .error()
              .code == Errc::kBusy);
      REQUIRE(::kill(pid, SIGKILL) == 0);
      CHECK(holder.finish() == -SIGKILL);
      const std::uint64_t at_exit = digest(pool);

      const auto disk = open_disk(options, inbox.sink());

      REQUIRE_MESSAGE(disk, to_string(disk.error()));
      const std::uint64_t at_lock = digest(pool);
      // Reading all of the file again takes longer than the rest of the dead process's I/O would.
      const AlignedMemory memory(kBytes);
      REQUIRE((*disk)->submit({.ticket = 2, .memory = {memory.span()}}));
      REQUIRE_FALSE(inbox.take(2).error);
      CHECK(digest(pool) == at_lock);
      const bool came_later = at_exit != at_lock;
      MESSAGE("bytes landed after the end of the process: " << came_later);
      ::munmap(mapped, kBytes);
    }
  }
}

}  // namespace
}  // namespace pegaflow::testing
