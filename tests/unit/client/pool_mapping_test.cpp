#include "client/pool_mapping.h"

#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/unique_fd.h"

namespace pegaflow {
namespace {

constexpr std::size_t kBytes = 1 << 20;

UniqueFd make_pool(int seals) {
  UniqueFd fd(::memfd_create("test-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(fd.get(), kBytes) == 0);
  REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

TEST_SUITE("PoolMapping") {
  TEST_CASE("both ends see the same bytes, until it is unmapped") {
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

  TEST_CASE("a pool whose size could change, or is another one, is refused") {
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

  TEST_CASE("a child does not get it") {
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
