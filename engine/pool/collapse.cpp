#include "engine/pool/collapse.h"

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <fstream>

#include <fcntl.h>
#include <sys/mman.h>

#include "base/units.h"

namespace pegaflow::engine {
namespace {

/// MADV_COLLAPSE of Linux 6.1, which older C libraries do not name.
constexpr int kCollapse = 25;

/// The time in which small pages for as much memory are allocated and touched, with a margin.
constexpr Duration kUsualTime = std::chrono::milliseconds(2);  // For 2 MiB.
constexpr std::int64_t kUsualBytes = 2 << 20;
/// Failures that may be different the next time, before no more are tried.
constexpr std::uint32_t kPassingFailures = 8;

/// The processor time of this thread, which other programs on the machine do not lengthen.
Duration cpu_time() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

std::uint64_t transparent_huge_page_bytes() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
  std::uint64_t bytes = 0;
  return file >> bytes ? bytes : 0;
}

Result<std::span<std::byte>> map_aligned(int fd, std::uint64_t size_bytes,
                                         std::uint64_t alignment) {
  const auto failed = [size_bytes](int error) -> Error {
    if (error == ENOMEM) {
      return {Errc::kOutOfCapacity, fmt::format("map {}: no memory", format_bytes(size_bytes))};
    }
    return fail_errno(error, "map " + format_bytes(size_bytes)).value();
  };
  // Address space with room for the alignment; the mapping replaces a part of it.
  const std::uint64_t reserved = size_bytes + alignment;
  void* const base =
      ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return tl::unexpected<Error>(failed(errno));
  auto* const first = static_cast<std::byte*>(base);
  const std::uint64_t beyond =
      alignment == 0 ? 0 : reinterpret_cast<std::uintptr_t>(base) % alignment;
  const std::uint64_t skipped = beyond == 0 ? 0 : alignment - beyond;
  std::byte* const begin = first + skipped;
  if (::mmap(begin, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
      MAP_FAILED) {
    const Error error = failed(errno);
    ::munmap(base, reserved);
    return tl::unexpected<Error>(error);
  }
  if (skipped != 0) ::munmap(base, skipped);
  // The kernel maps whole small pages.
  constexpr std::uint64_t kSmallPage = 4096;
  std::byte* const end = begin + (size_bytes + kSmallPage - 1) / kSmallPage * kSmallPage;
  if (end < first + reserved) ::munmap(end, static_cast<std::size_t>(first + reserved - end));
  return std::span(begin, size_bytes);
}

Duration Collapse::patience_for(std::uint64_t size_bytes, unsigned threads) {
  constexpr Duration kLeast = std::chrono::milliseconds(100);
  constexpr int kPart = 6;
  const Duration usual = kUsualTime * static_cast<std::int64_t>(size_bytes / kUsualBytes);
  return std::min<Duration>(kLeast + usual / kPart, kPatience * std::max(1U, threads));
}

Collapse::Collapse(int fd, std::uint64_t page_bytes, Duration patience)
    : fd_(fd), page_bytes_(page_bytes), patience_ns_(page_bytes == 0 ? 0 : patience.count()) {}

void Collapse::add(std::span<std::byte> chunk, std::uint64_t offset) {
  if (patience_ns_.load() <= 0) return;
  const std::uint64_t first = (offset + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  const std::uint64_t end = (offset + chunk.size()) / page_bytes_ * page_bytes_;
  if (first >= end) return;
  const Duration began = cpu_time();
  const int error = make(chunk.subspan(first - offset, end - first), first);
  const auto bytes = static_cast<std::int64_t>(end - first);
  const Duration usual = kUsualTime * std::max<std::int64_t>(1, bytes / kUsualBytes);
  const Duration took = cpu_time() - began;
  if (took > usual) patience_ns_.fetch_sub((took - usual).count());
  if (error == 0) {
    bytes_.fetch_add(end - first);
    return;
  }
  // EAGAIN: a page was in use for a moment, and others may succeed. EINVAL: an older kernel, or one
  // that is set to deny. ENOMEM, EBUSY: there are none left.
  const bool may_pass = error == EAGAIN && passing_failures_.fetch_add(1) < kPassingFailures;
  if (!may_pass) patience_ns_.store(0);
}

/// Puts whole huge pages on huge pages. Returns an errno, 0 on success.
int Collapse::make(std::span<std::byte> pages, std::uint64_t offset) const {
  // The kernel chooses the NUMA node of a huge page by a page that it contains.
  for (std::uint64_t at = 0; at < pages.size(); at += page_bytes_) {
    if (::fallocate(fd_, 0, static_cast<off_t>(offset + at), 4096) != 0) return errno;
  }
  // One call for all of them: each makes all cores empty their lists of pages first.
  return ::madvise(pages.data(), pages.size(), kCollapse) == 0 ? 0 : errno;
}

}  // namespace pegaflow::engine
