#include "engine/pool/pool.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "engine/pool/memory_room.h"
#include "tests/support/mapping_flags.h"
#include "tests/support/skip.h"

namespace pegaflow {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
const std::atomic<bool> kGoOn{false};

Result<engine::Pool> make(std::uint64_t size_bytes) {
  return engine::Pool::create({.size_bytes = size_bytes}, kGoOn, {});
}

/// The count of a mapping's pages that are in memory.
std::size_t resident_pages(std::span<std::byte> bytes) {
  std::vector<unsigned char> pages((bytes.size() + 4095) / 4096);
  REQUIRE(::mincore(bytes.data(), bytes.size(), pages.data()) == 0);
  std::size_t count = 0;
  for (const unsigned char page : pages) count += page & 1U;
  return count;
}

std::uint64_t allocated_bytes(int fd) {
  struct stat about {};
  REQUIRE(::fstat(fd, &about) == 0);
  return static_cast<std::uint64_t>(about.st_blocks) * 512;
}

TEST_SUITE("Pool") {
  TEST_CASE("every page is there before create returns") {
    const auto pool = make(70 * kMiB + 5000);

    REQUIRE(pool);
    CHECK(pool->size_bytes() == 70 * kMiB + 4096);
    CHECK(resident_pages(pool->bytes()) == pool->size_bytes() / 4096);
    CHECK(allocated_bytes(pool->fd()) == pool->size_bytes());
  }

  TEST_CASE("a holder of the descriptor can neither change its size nor remove the seals") {
    const auto pool = make(kMiB);
    REQUIRE(pool);

    CHECK(::ftruncate(pool->fd(), 0) == -1);
    CHECK(errno == EPERM);
    CHECK(::ftruncate(pool->fd(), 2 * kMiB) == -1);
    CHECK(errno == EPERM);
    CHECK(::fcntl(pool->fd(), F_ADD_SEALS, F_SEAL_WRITE) == -1);
    CHECK(errno == EPERM);
  }

  TEST_CASE("a second mapping of the descriptor sees the same bytes") {
    const auto pool = make(kMiB);
    REQUIRE(pool);
    void* const other = ::mmap(nullptr, kMiB, PROT_READ, MAP_SHARED, pool->fd(), 0);
    REQUIRE(other != MAP_FAILED);

    pool->bytes()[12345] = std::byte{0x5A};

    CHECK(static_cast<const std::byte*>(other)[12345] == std::byte{0x5A});
    ::munmap(other, kMiB);
  }

  TEST_CASE("a forked child does not have the mapping") {
    const auto pool = make(kMiB);
    REQUIRE(pool);

    const pid_t child = ::fork();
    if (child == 0) {
      unsigned char page = 0;
      // ENOMEM: nothing is mapped there.
      ::_exit(::mincore(pool->bytes().data(), 4096, &page) == -1 && errno == ENOMEM ? 0 : 1);
    }

    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }

  TEST_CASE("a core dump does not contain the pool") {
    const auto pool = make(kMiB);
    REQUIRE(pool);
    CHECK(testing::flags_of_mapping(pool->bytes().data()).find(" dd ") != std::string::npos);
  }

  TEST_CASE("progress rises to the size, and the memory goes with the pool") {
    std::mutex mutex;
    std::vector<std::uint64_t> told;
    int fd = -1;
    {
      const auto pool = engine::Pool::create({.size_bytes = 100 * kMiB, .threads = 2}, kGoOn,
                                             [&](std::uint64_t done, std::uint64_t size) {
                                               const std::scoped_lock lock(mutex);
                                               told.push_back(done);
                                               CHECK(size == 100 * kMiB);
                                             });
      REQUIRE(pool);
      fd = pool->fd();
    }

    CHECK(*std::max_element(told.begin(), told.end()) == 100 * kMiB);
    CHECK(::fcntl(fd, F_GETFD) == -1);
  }

  TEST_CASE("a moved pool has one owner") {
    auto first = make(kMiB);
    REQUIRE(first);
    engine::Pool second = std::move(*first);

    CHECK(first->bytes().empty());
    CHECK(second.size_bytes() == kMiB);
    second.bytes()[0] = std::byte{1};
  }

  TEST_CASE("stop ends it early") {
    const std::atomic<bool> stop{true};

    const auto pool = engine::Pool::create({.size_bytes = 64 * kMiB}, stop, {});

    REQUIRE_FALSE(pool);
    CHECK(pool.error().code == Errc::kCancelled);
  }

  TEST_CASE("less than a page is the caller's mistake") {
    const auto pool = make(4095);

    REQUIRE_FALSE(pool);
    CHECK(pool.error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("more than the machine has is refused before a byte is allocated") {
    const auto pool = make(std::uint64_t{1} << 46);

    REQUIRE_FALSE(pool);
    CHECK(pool.error().code == Errc::kRefused);
    CHECK(pool.error().detail.find("64 TiB") != std::string::npos);
    CHECK(pool.error().detail.find("--pool-size") != std::string::npos);
  }

  TEST_CASE("more than is free now, but not more than exists, may be available later") {
    // Another pool holds more than the reserve of one gibibyte, so that such a size exists.
    const auto other = make(1200 * kMiB);
    const auto room = engine::memory_room();
    REQUIRE(room);
    if (!other || room->limited_by != "MemAvailable")
      PEGA_SKIP("too little memory, or a cgroup limits it");
    // Not more than exists, whatever memory other processes return meanwhile: the other pool stays.
    const std::uint64_t size = room->possible_bytes - 1024 * kMiB;
    REQUIRE(size + 1024 * kMiB > room->available_bytes);

    const auto pool = make(size);

    REQUIRE_FALSE(pool);
    CHECK(pool.error().code == Errc::kOutOfCapacity);
    CHECK(pool.error().detail.find(room->limited_by) != std::string::npos);
  }

  TEST_CASE("missing huge pages that are required are refused with the command") {
    const auto pages = engine::huge_pages();
    REQUIRE(pages);
    const auto pool = engine::Pool::create(
        {.size_bytes = (pages->free + 1) * std::max<std::uint64_t>(pages->page_bytes, 2 * kMiB),
         .huge_pages = engine::Pool::HugePages::kRequired},
        kGoOn, {});

    REQUIRE_FALSE(pool);
    const bool right_code =
        pool.error().code == Errc::kRefused || pool.error().code == Errc::kOutOfCapacity;
    CHECK(right_code);
    if (pages->page_bytes != 0) {
      CHECK(pool.error().detail.find("vm.nr_hugepages=") != std::string::npos);
    }
  }

  TEST_CASE("huge pages are used where enough are reserved") {
    const auto before = engine::huge_pages();
    REQUIRE(before);
    const auto set = [](std::uint64_t count) {
      std::ofstream file("/proc/sys/vm/nr_hugepages");
      file << count;
      return static_cast<bool>(file.flush());
    };
    if (before->page_bytes != 2 * kMiB || !set(before->total + 8) ||
        engine::huge_pages()->free < before->free + 8) {
      set(before->total);
      PEGA_SKIP("this process cannot reserve huge pages");
    }

    {
      const auto pool = make(16 * kMiB);
      REQUIRE(pool);
      CHECK(pool->page_bytes() == 2 * kMiB);
      CHECK(allocated_bytes(pool->fd()) == 16 * kMiB);
      CHECK(huge_page_advice(*pool).empty());
      CHECK(::ftruncate(pool->fd(), 0) == -1);
    }
    CHECK(set(before->total));
  }

  TEST_CASE("without huge pages the advice is a command") {
    const auto pages = engine::huge_pages();
    REQUIRE(pages);
    const auto pool = make(kMiB);  // Smaller than any huge page.
    REQUIRE(pool);

    const std::string advice = huge_page_advice(*pool);

    if (pages->page_bytes == 0) {
      CHECK(advice == "this kernel has no huge pages");
    } else {
      CHECK(advice.find("sysctl -w vm.nr_hugepages=") != std::string::npos);
    }
  }

  TEST_CASE("the default leaves as much as it takes") {
    const auto room = engine::memory_room();
    REQUIRE(room);

    const auto size = engine::default_pool_bytes();

    REQUIRE(size);
    CHECK(*size <= std::uint64_t{30} << 30);
    CHECK(*size <= std::max(room->available_bytes / 2 + 256 * kMiB, 64 * kMiB));
    CHECK(*size % 4096 == 0);
  }
}

}  // namespace
}  // namespace pegaflow
