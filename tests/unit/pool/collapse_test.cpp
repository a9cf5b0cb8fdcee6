#include "engine/pool/collapse.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "engine/pool/pool.h"
#include "tests/support/skip.h"

namespace pegaflow {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
const std::atomic<bool> kGoOn{false};

/// The bytes of the mapping at `begin` that the kernel maps in huge pages of shared memory.
std::uint64_t huge_mapped_bytes(const std::byte* begin) {
  std::ifstream file("/proc/self/smaps");
  std::ostringstream wanted;
  wanted << std::hex << reinterpret_cast<std::uintptr_t>(begin) << '-';
  bool is_found = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(wanted.str())) is_found = true;
    if (is_found && line.starts_with("ShmemPmdMapped:")) {
      return std::stoull(line.substr(line.find(':') + 1)) * 1024;
    }
  }
  return 0;
}

std::uint64_t allocated_bytes(int fd) {
  struct stat about {};
  REQUIRE(::fstat(fd, &about) == 0);
  return static_cast<std::uint64_t>(about.st_blocks) * 512;
}

/// A memfd that is mapped at a multiple of a huge page.
class Memory {
 public:
  explicit Memory(std::uint64_t size_bytes) : fd_(::memfd_create("collapse_test", MFD_CLOEXEC)) {
    REQUIRE(::ftruncate(fd_.get(), static_cast<off_t>(size_bytes)) == 0);
    const auto mapped = engine::map_aligned(fd_.get(), size_bytes, 2 * kMiB);
    REQUIRE(mapped);
    bytes_ = *mapped;
  }
  ~Memory() { ::munmap(bytes_.data(), bytes_.size()); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

 private:
  UniqueFd fd_;
  std::span<std::byte> bytes_;
};

/// Whether this kernel gives huge pages of 2 MiB to a memfd now.
bool has_huge_pages() {
  if (engine::transparent_huge_page_bytes() != 2 * kMiB) return false;
  const Memory memory(2 * kMiB);
  engine::Collapse collapse(memory.fd(), 2 * kMiB, engine::Collapse::kPatience);
  collapse.add(memory.bytes(), 0);
  return collapse.bytes() == 2 * kMiB;
}

TEST_SUITE("Collapse") {
  TEST_CASE("whole huge pages of a chunk are allocated as such and read as zeros") {
    if (!has_huge_pages()) PEGA_SKIP("this kernel has no huge pages for tmpfs now");
    const Memory memory(16 * kMiB);
    engine::Collapse collapse(memory.fd(), 2 * kMiB, engine::Collapse::kPatience);

    collapse.add(memory.bytes(), 0);

    CHECK(collapse.bytes() == 16 * kMiB);
    CHECK(huge_mapped_bytes(memory.bytes().data()) == 16 * kMiB);
    CHECK(std::ranges::all_of(memory.bytes(), [](std::byte each) { return each == std::byte{0}; }));
  }

  TEST_CASE("parts of huge pages at the ends of a chunk are left alone") {
    if (!has_huge_pages()) PEGA_SKIP("this kernel has no huge pages for tmpfs now");
    const Memory memory(16 * kMiB);
    engine::Collapse collapse(memory.fd(), 2 * kMiB, engine::Collapse::kPatience);

    collapse.add(memory.bytes().subspan(kMiB, 6 * kMiB), kMiB);

    CHECK(collapse.bytes() == 4 * kMiB);
    CHECK(allocated_bytes(memory.fd()) == 4 * kMiB);
  }

  TEST_CASE("a chunk without a whole huge page is left alone") {
    const Memory memory(4 * kMiB);
    engine::Collapse collapse(memory.fd(), 2 * kMiB, engine::Collapse::kPatience);

    collapse.add(memory.bytes().subspan(kMiB, 2 * kMiB), kMiB);

    CHECK(collapse.bytes() == 0);
    CHECK(allocated_bytes(memory.fd()) == 0);
  }

  TEST_CASE("without huge pages in the kernel nothing is allocated") {
    const Memory memory(4 * kMiB);
    engine::Collapse collapse(memory.fd(), 0, engine::Collapse::kPatience);

    collapse.add(memory.bytes(), 0);

    CHECK(collapse.bytes() == 0);
    CHECK(allocated_bytes(memory.fd()) == 0);
  }

  TEST_CASE("after a refusal of the kernel it asks for no more") {
    const Memory memory(8 * kMiB);
    engine::Collapse collapse(memory.fd(), 2 * kMiB, engine::Collapse::kPatience);
    // The kernel refuses a range that is not mapped.
    ::munmap(memory.bytes().data(), 2 * kMiB);

    collapse.add(memory.bytes().first(2 * kMiB), 0);
    collapse.add(memory.bytes().subspan(2 * kMiB), 2 * kMiB);

    CHECK(collapse.bytes() == 0);
    CHECK(allocated_bytes(memory.fd()) == 4096);
  }

  TEST_CASE("a mapping lies at a multiple of its alignment and has no other mapping around it") {
    const UniqueFd fd(::memfd_create("collapse_test", MFD_CLOEXEC));
    REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(kMiB + 5000)) == 0);

    const auto mapped = engine::map_aligned(fd.get(), kMiB + 5000, 2 * kMiB);

    REQUIRE(mapped);
    CHECK(mapped->size() == kMiB + 5000);
    CHECK(reinterpret_cast<std::uintptr_t>(mapped->data()) % (2 * kMiB) == 0);
    // What was reserved for the alignment is free again: a mapping may be made right behind it.
    unsigned char page = 0;
    CHECK(::mincore(mapped->data() + kMiB + 8192, 4096, &page) == -1);
    ::munmap(mapped->data(), mapped->size());
  }

  TEST_CASE("a descriptor that cannot be mapped is reported") {
    const auto mapped = engine::map_aligned(-1, kMiB, 0);

    REQUIRE_FALSE(mapped);
    CHECK(mapped.error().detail.find("map 1 MiB") != std::string::npos);
  }

  TEST_CASE("a pool on tmpfs lies on the huge pages that it reports") {
    const auto pool = engine::Pool::create({.size_bytes = 65 * kMiB}, kGoOn, {});
    REQUIRE(pool);
    if (pool->page_bytes() != 4096) PEGA_SKIP("huge pages are reserved");

    CHECK(huge_mapped_bytes(pool->bytes().data()) >= pool->huge_bytes());
    CHECK(allocated_bytes(pool->fd()) == 65 * kMiB);
    if (has_huge_pages() && pool->huge_bytes() == 64 * kMiB) {
      CHECK(huge_page_advice(*pool).empty());
    }
  }

  TEST_CASE("a pool that is interleaved over NUMA nodes lies on small pages") {
    const auto pool = engine::Pool::create(
        {.size_bytes = 32 * kMiB, .numa = engine::NumaPolicy::kInterleave}, kGoOn, {});
    REQUIRE(pool);
    if (pool->page_bytes() != 4096) PEGA_SKIP("huge pages are reserved");

    CHECK(pool->huge_bytes() == 0);
  }
}

}  // namespace
}  // namespace pegaflow
