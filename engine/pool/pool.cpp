#include "engine/pool/pool.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/units.h"
#include "engine/pool/collapse.h"
#include "engine/pool/memory_room.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace pegaflow::engine {
namespace {

constexpr std::uint64_t kSmallPage = 4096;

/// Reserved for the rest of the machine: page tables of every client, their stacks, the kernel.
constexpr std::uint64_t kReserveBytes = std::uint64_t{1} << 30;

/// Small enough that a stop is noticed within tens of milliseconds, and a multiple of every huge
/// page size up to 32 MiB; larger pages set the chunk size themselves.
constexpr std::uint64_t kChunkBytes = std::uint64_t{32} << 20;

/// Makes every page of `chunk` present and writable. Returns an errno, 0 on success.
int touch(std::span<std::byte> chunk, std::uint64_t page_bytes) {
  while (::madvise(chunk.data(), chunk.size(), MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    // An older kernel. The pages are allocated already, so a write cannot fail.
    for (std::size_t at = 0; at < chunk.size(); at += page_bytes) {
      static_cast<volatile std::byte*>(chunk.data())[at] = std::byte{0};
    }
    return 0;
  }
  return 0;
}

/// Allocates the pages of `chunk`, which begins at `offset` of `fd`. Returns an errno, 0 on
/// success.
int allocate(int fd, std::uint64_t offset, std::span<std::byte> chunk, std::uint64_t page_bytes,
             Collapse& collapse) {
  // On tmpfs fallocate() allocates the pages and the touch zeroes them, outside the inode's lock.
  // hugetlb's fallocate() would zero them in one thread at a time; there mmap() has reserved them.
  if (page_bytes == kSmallPage) {
    collapse.add(chunk, offset);
    while (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(chunk.size())) != 0) {
      if (errno != EINTR) return errno;
    }
  }
  return touch(chunk, page_bytes);
}

/// A part of the pool that is touched from the cores of one NUMA node.
struct Part {
  std::span<std::byte> bytes;
  std::uint64_t offset = 0;              ///< In the pool.
  std::span<const std::uint32_t> cores;  ///< Empty: any.
  std::atomic<std::uint64_t> next{0};    ///< The first byte that no thread has taken.
};

/// The parts of the pool according to `placement`; a single one if it has no ranges. Each begins at
/// a page of memory, and so may contain a page of its neighbor, which was bound to the neighbor's
/// NUMA node.
std::vector<Part> parts_of(std::span<std::byte> bytes, std::uint64_t page_bytes,
                           const PoolPlacement& placement) {
  std::vector<Part> parts(std::max<std::size_t>(1, placement.ranges.size()));
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const bool is_last = i + 1 == parts.size();
    const std::uint64_t end =
        is_last ? bytes.size() : placement.ranges[i].end / page_bytes * page_bytes;
    parts[i].bytes = bytes.subspan(begin, end - begin);
    parts[i].offset = begin;
    if (!placement.ranges.empty()) parts[i].cores = placement.numa_nodes[i].cores;
    begin = end;
  }
  return parts;
}

/// All threads take chunks until none is left, one fails, or `stop` is set. Each thread begins with
/// another part, and helps with the others when that is done.
Result<void> allocate_all(int fd, std::span<std::byte> bytes, std::uint64_t page_bytes,
                          const PoolPlacement& placement, Collapse& collapse, unsigned threads,
                          const std::atomic<bool>& stop, const Pool::Progress& progress) {
  const std::uint64_t chunk_bytes = std::max(kChunkBytes, page_bytes);
  std::vector<Part> parts = parts_of(bytes, page_bytes, placement);
  std::atomic<std::uint64_t> done{0};
  std::atomic<int> failure{0};
  const auto pull_part = [&](Part& part) {
    while (!stop.load(std::memory_order_relaxed) && failure.load(std::memory_order_relaxed) == 0) {
      const std::uint64_t at = part.next.fetch_add(chunk_bytes);
      if (at >= part.bytes.size()) return;
      const auto chunk =
          part.bytes.subspan(at, std::min<std::uint64_t>(chunk_bytes, part.bytes.size() - at));
      if (const int error = allocate(fd, part.offset + at, chunk, page_bytes, collapse);
          error != 0) {
        failure.store(error);
        return;
      }
      const std::uint64_t total = done.fetch_add(chunk.size()) + chunk.size();
      if (progress) progress(total, bytes.size());
    }
  };
  const auto pull = [&](std::size_t first) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      Part& part = parts[(first + i) % parts.size()];
      // Write the zeros from the cores next to the memory. From elsewhere it only takes longer.
      if (!part.cores.empty()) (void)keep_thread_on(part.cores);
      pull_part(part);
    }
  };

  std::vector<std::thread> others;
  try {
    while (others.size() + 1 < threads) others.emplace_back(pull, others.size() + 1);
  } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
    // A limit on threads: fewer threads take longer, which is no error.
  }
  const std::vector<std::uint32_t> own_cores = allowed_cores();
  pull(0);
  if (parts.size() > 1) (void)keep_thread_on(own_cores);
  for (std::thread& other : others) other.join();

  if (stop.load()) return fail(Errc::kCancelled, "allocate the pool: stopped");
  const int error = failure.load();
  // A huge page that the cgroup refuses, or that another process took, shows as EFAULT.
  if (error == ENOMEM || error == ENOSPC || error == EFAULT) {
    return fail(Errc::kOutOfCapacity, "allocate a pool of {}: {}", format_bytes(bytes.size()),
                std::generic_category().message(error));
  }
  if (error != 0) return fail_errno(error, "allocate the pool");
  return {};
}

/// The huge page size if enough pages of it are free for the pool.
Result<std::optional<std::uint64_t>> reserved_huge_pages(const Pool::Options& options) {
  PEGA_TRY_LET(const HugePages pages, huge_pages());
  if (pages.page_bytes != 0 && options.size_bytes >= pages.page_bytes &&
      pages.free >= options.size_bytes / pages.page_bytes) {
    return pages.page_bytes;
  }
  if (options.huge_pages != Pool::HugePages::kRequired) return std::nullopt;
  if (pages.page_bytes == 0) return fail(Errc::kRefused, "this kernel has no huge pages");
  const std::uint64_t needed = std::max<std::uint64_t>(1, options.size_bytes / pages.page_bytes);
  const auto code = pages.total >= needed ? Errc::kOutOfCapacity : Errc::kRefused;
  return fail(
      code,
      "a pool of {} needs {} huge pages of {}, {} are free of {}: sysctl -w vm.nr_hugepages={}",
      format_bytes(options.size_bytes), needed, format_bytes(pages.page_bytes), pages.free,
      pages.total, needed + pages.total - pages.free);
}

/// The size of the huge pages to put a pool on tmpfs on; 0: none. The kernel would put all of them
/// on the first of the NUMA nodes that a pool is to be interleaved over.
std::uint64_t collapsed_page_bytes(const Pool::Options& options) {
  return options.numa == NumaPolicy::kInterleave ? 0 : transparent_huge_page_bytes();
}

Result<void> check_room(std::uint64_t size_bytes) {
  PEGA_TRY_LET(const MemoryRoom room, memory_room());
  const std::uint64_t needed = size_bytes + kReserveBytes;
  if (needed <= room.available_bytes) return {};
  const bool never = needed > room.possible_bytes;
  return fail(never ? Errc::kRefused : Errc::kOutOfCapacity,
              "a pool of {} and a reserve of {} do not fit: {} are free (limited by {}){}",
              format_bytes(size_bytes), format_bytes(kReserveBytes),
              format_bytes(room.available_bytes), room.limited_by,
              never ? fmt::format(" of {} in total; choose a smaller --pool-size",
                                  format_bytes(room.possible_bytes))
                    : "");
}

}  // namespace

Result<Pool> Pool::create(const Options& options, const std::atomic<bool>& stop,
                          const Progress& progress) {
  if (options.size_bytes < kSmallPage) {
    return fail(Errc::kInvalidArgument, "a pool of {} bytes is smaller than a page of memory",
                options.size_bytes);
  }
  PEGA_TRY_LET(const std::optional<std::uint64_t> huge, reserved_huge_pages(options));
  const std::uint64_t page_bytes = huge.value_or(kSmallPage);
  const std::uint64_t size_bytes = options.size_bytes / page_bytes * page_bytes;
  if (!huge) PEGA_TRY(check_room(size_bytes));

  UniqueFd fd(
      ::memfd_create("pegaflow-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB : 0U)));
  if (!fd) return fail_errno(errno, "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) {
    return fail_errno(errno, "set the size of the pool");
  }
  const std::uint64_t collapsed_bytes = huge ? 0 : collapsed_page_bytes(options);
  PEGA_TRY_LET(Pool pool, map(std::move(fd), size_bytes, page_bytes, collapsed_bytes));
  pool.placement_ = place_pool(pool.bytes(), page_bytes, options.numa, options.numa_nodes);
  const unsigned threads =
      options.threads != 0 ? options.threads : std::max(1U, std::thread::hardware_concurrency());
  Collapse collapse(pool.fd(), collapsed_bytes, Collapse::patience_for(size_bytes, threads));
  PEGA_TRY(allocate_all(pool.fd(), pool.bytes(), page_bytes, pool.placement_, collapse, threads,
                        stop, progress));
  pool.huge_bytes_ = huge ? size_bytes : collapse.bytes();
  verify_placement(pool.bytes(), pool.placement_);
  if (::fcntl(pool.fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return fail_errno(errno, "seal the pool");
  }
  return pool;
}

Result<Pool> Pool::map(UniqueFd fd, std::uint64_t size_bytes, std::uint64_t page_bytes,
                       std::uint64_t collapsed_bytes) {
  const std::uint64_t alignment = page_bytes > kSmallPage ? page_bytes : collapsed_bytes;
  PEGA_TRY_LET(const std::span<std::byte> bytes, map_aligned(fd.get(), size_bytes, alignment));
  Pool pool(std::move(fd), bytes, page_bytes);
  // A child that keeps the mapping would keep the memory after this process is gone.
  if (::madvise(bytes.data(), size_bytes, MADV_DONTFORK) != 0) {
    return fail_errno(errno, "keep the pool from forked children");
  }
  // It would make a core dump of this process as large as the pool.
  if (::madvise(bytes.data(), size_bytes, MADV_DONTDUMP) != 0) {
    return fail_errno(errno, "keep the pool out of core dumps");
  }
  return pool;
}

Result<Pool> Pool::adopt(UniqueFd fd, const Options& options) {
  struct stat status = {};
  if (::fstat(fd.get(), &status) != 0) return fail_errno(errno, "look at the kept pool");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  // The size of a huge page on hugetlbfs, and of a small one on tmpfs.
  const auto page_bytes = static_cast<std::uint64_t>(status.st_blksize);
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || size < kSmallPage || page_bytes < kSmallPage) {
    return fail(Errc::kRefused, "the kept pool is no sealed memory of a server");
  }
  if (options.size_bytes != 0 && options.size_bytes / page_bytes * page_bytes != size) {
    return fail(Errc::kRefused, "the kept pool has {}, --pool-size {}", format_bytes(size),
                format_bytes(options.size_bytes));
  }
  if (options.huge_pages == HugePages::kRequired && page_bytes == kSmallPage) {
    return fail(Errc::kRefused, "the kept pool has no huge pages, which --use-hugepages requires");
  }
  PEGA_TRY_LET(Pool pool, map(std::move(fd), size, page_bytes, collapsed_page_bytes(options)));
  if (page_bytes > kSmallPage) pool.huge_bytes_ = size;
  pool.placement_ = place_pool(pool.bytes(), page_bytes, options.numa, options.numa_nodes);
  verify_placement(pool.bytes(), pool.placement_);
  return pool;
}

Pool::Pool(UniqueFd fd, std::span<std::byte> bytes, std::uint64_t page_bytes) noexcept
    : fd_(std::move(fd)), bytes_(bytes), page_bytes_(page_bytes) {}

Pool::Pool(Pool&& other) noexcept
    : fd_(std::move(other.fd_)),
      bytes_(std::exchange(other.bytes_, {})),
      page_bytes_(other.page_bytes_),
      huge_bytes_(other.huge_bytes_),
      placement_(std::move(other.placement_)) {}

Pool& Pool::operator=(Pool&& other) noexcept {
  if (this != &other) {
    std::swap(fd_, other.fd_);
    std::swap(bytes_, other.bytes_);
    std::swap(page_bytes_, other.page_bytes_);
    std::swap(huge_bytes_, other.huge_bytes_);
    std::swap(placement_, other.placement_);
  }
  return *this;
}

Pool::~Pool() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

std::string huge_page_advice(const Pool& pool) {
  // Of a pool on tmpfs a rest below a huge page never lies on one.
  const std::uint64_t rest = pool.huge_bytes() == 0 ? 0 : transparent_huge_page_bytes();
  if (pool.huge_bytes() != 0 && pool.huge_bytes() + rest > pool.size_bytes()) return {};
  const auto pages = huge_pages();
  if (!pages || pages->page_bytes == 0) return "this kernel has no huge pages";
  const std::uint64_t needed =
      (pool.size_bytes() + pages->page_bytes - 1) / pages->page_bytes + pages->total - pages->free;
  std::string advice =
      fmt::format("reserve huge pages before the start: sysctl -w vm.nr_hugepages={}", needed);
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string setting;
  if (std::getline(file, setting)) {
    const std::size_t open = setting.find('[');
    const std::size_t close = setting.find(']');
    if (open != std::string::npos && close != std::string::npos &&
        setting.substr(open + 1, close - open - 1) == "never") {
      advice +=
          "; or let tmpfs use them: echo always > "
          "/sys/kernel/mm/transparent_hugepage/shmem_enabled "
          "(it is never)";
    }
  }
  return advice;
}

Result<std::uint64_t> default_pool_bytes() {
  constexpr std::uint64_t kMost = std::uint64_t{30} << 30;
  constexpr std::uint64_t kLeast = std::uint64_t{64} << 20;
  PEGA_TRY_LET(const MemoryRoom room, memory_room());
  // Half of it, but never so much that create() would reject it.
  const std::uint64_t left = room.available_bytes - std::min(room.available_bytes, kReserveBytes);
  const std::uint64_t bytes = std::min(room.available_bytes / 2, left);
  return std::clamp(bytes / kSmallPage * kSmallPage, kLeast, kMost);
}

}  // namespace pegaflow::engine
