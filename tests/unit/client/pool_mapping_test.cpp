#include "client/pool_mapping.h"

#include <cstring>
#include <span>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "tests/support/mapping_flags.h"

namespace pegaflow {
namespace {

constexpr std::size_t kBytes = 1 << 20;

UniqueFd make_pool(int seals, std::size_t size_bytes = kBytes) {
  UniqueFd fd(::memfd_create("test-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::fallocate(fd.get(), 0, 0, static_cast<off_t>(size_bytes)) == 0);
  REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

/// Page faults of this thread while it writes a byte into each page.
long faults_of_first_use(std::span<std::byte> bytes) {
  const auto faults = [] {
    rusage usage{};
    REQUIRE(::getrusage(RUSAGE_THREAD, &usage) == 0);
    return usage.ru_minflt;
  };
  const long before = faults();
  for (std::size_t at = 0; at < bytes.size(); at += 4096) bytes[at] = std::byte{1};
  return faults() - before;
}

TEST_SUITE("PoolMapping") {
  TEST_CASE("both ends see the same bytes until the pool is unmapped") {
    const UniqueFd fd = make_pool(F_SEAL_SHRINK | F_SEAL_GROW);

    Result<PoolMapping> mapping = PoolMapping::map(fd.get(), kBytes);

    REQUIRE(mapping);
    REQUIRE(mapping->bytes().size() == kBytes);
    mapping->bytes()[123] = std::byte{42};
    char byte = 0;
    REQUIRE(::pread(fd.get(), &byte, 1, 123) == 1);
    CHECK(byte == 42);
    PoolMapping moved = std::move(*mapping);
    CHECK(mapping->bytes().empty());
    std::byte* const at = moved.bytes().data();
    moved = PoolMapping();
    unsigned char resident = 0;
    CHECK(::mincore(at, 4096, &resident) != 0);  // Nothing is mapped there.
  }

  TEST_CASE("a core dump of the engine does not contain the pool") {
    const UniqueFd fd = make_pool(F_SEAL_SHRINK | F_SEAL_GROW);
    const Result<PoolMapping> mapping = PoolMapping::map(fd.get(), kBytes);
    REQUIRE(mapping);
    CHECK(testing::flags_of_mapping(mapping->bytes().data()).find(" dd ") != std::string::npos);
  }

  TEST_CASE("a pool of another size, or whose size could change, is rejected") {
    CHECK(PoolMapping::map(make_pool(0).get(), kBytes).error().code == Errc::kRefused);
    CHECK(PoolMapping::map(make_pool(F_SEAL_GROW).get(), kBytes).error().code == Errc::kRefused);
    const UniqueFd fd = make_pool(F_SEAL_SHRINK | F_SEAL_GROW);
    CHECK(PoolMapping::map(fd.get(), 2 * kBytes).error().code == Errc::kRefused);
    CHECK(PoolMapping::map(fd.get(), 0).error().code == Errc::kRefused);
    const UniqueFd no_memory(::open("/dev/null", O_RDWR | O_CLOEXEC));
    CHECK(PoolMapping::map(no_memory.get(), kBytes).error().code == Errc::kRefused);
  }

  TEST_CASE("a descriptor that cannot be mapped is an error") {
    CHECK_FALSE(PoolMapping::map(-1, kBytes));
    const UniqueFd sealed = make_pool(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
    CHECK_FALSE(PoolMapping::map(sealed.get(), kBytes));
  }

  TEST_CASE("a populated pool is used without page faults") {
    constexpr std::size_t kPages = 8192;
    // Not whole slices, and of another length than what is written in one go.
    const UniqueFd fd = make_pool(F_SEAL_SHRINK | F_SEAL_GROW, kPages * 4096 + 4096);
    PoolMapping plain = PoolMapping::map(fd.get(), kPages * 4096 + 4096).value();
    PoolMapping populated = PoolMapping::map(fd.get(), kPages * 4096 + 4096).value();

    populated.populate();
    PoolMapping moved = std::move(populated);
    moved.wait_populated();

    // A sanitizer's memory causes page faults of its own in both; and a kernel that is short of
    // memory, or moves it, removes some entries again.
    const auto first_faults = faults_of_first_use(plain.bytes());
    CHECK(first_faults > faults_of_first_use(moved.bytes()) + kPages / 2);
  }

  TEST_CASE("a mapping may be unmapped while it is populated") {
    constexpr std::size_t kSize = 256 << 20;
    const UniqueFd fd = make_pool(F_SEAL_SHRINK | F_SEAL_GROW, kSize);
    for (int round = 0; round < 20; ++round) {
      PoolMapping mapping = PoolMapping::map(fd.get(), kSize).value();
      std::byte* const at = mapping.bytes().data();

      mapping.populate();
      if (round % 2 == 0) mapping.bytes()[kSize / 20 * round] = std::byte{7};  // As a copy does.
      mapping = PoolMapping();

      unsigned char resident = 0;
      CHECK(::mincore(at, 4096, &resident) != 0);
    }
    PoolMapping nothing;
    nothing.populate();
    nothing.wait_populated();
  }

  TEST_CASE("a child does not inherit the mapping") {
    const UniqueFd fd = make_pool(F_SEAL_SHRINK | F_SEAL_GROW);
    const PoolMapping mapping = PoolMapping::map(fd.get(), kBytes).value();
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      unsigned char resident = 0;
      ::_exit(::mincore(mapping.bytes().data(), 4096, &resident) != 0 ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
}

}  // namespace
}  // namespace pegaflow
