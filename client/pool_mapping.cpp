#include "client/pool_mapping.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/os/thread.h"
#include "base/units.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"mover"};

/// The kernel holds the lock of the whole address space for one slice, about 0.2 ms: the longest
/// time that an mmap() of the engine, or unmapping, has to wait.
constexpr std::size_t kSliceBytes = std::size_t{2} << 20;

}  // namespace

/// The thread that enters the pages. The destructor stops and joins it.
class PoolMapping::Population {
 public:
  explicit Population(std::span<std::byte> bytes) {
    Result<std::thread> thread = start_thread("pega-populate", [this, bytes] { run(bytes); });
    if (thread) {
      thread_ = std::move(*thread);
    } else {
      kLog.info("pool not populated, copies will cause page faults why=\"{}\"",
                to_string(thread.error()));
    }
  }
  Population(const Population&) = delete;
  Population& operator=(const Population&) = delete;
  ~Population() {
    stop_.store(true, std::memory_order_relaxed);
    wait();
  }

  void wait() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run(std::span<std::byte> bytes) {
    for (; !bytes.empty() && !stop_.load(std::memory_order_relaxed);
         bytes = bytes.subspan(std::min(kSliceBytes, bytes.size()))) {
      // A read fault enters 16 pages and a write fault one, and in shared memory both are writable:
      // 0.09 s per GiB against 0.2 to 0.26. The server has allocated every page.
      if (::madvise(bytes.data(), std::min(kSliceBytes, bytes.size()), MADV_POPULATE_READ) != 0 &&
          errno != EINTR && errno != EAGAIN) {
        kLog.info("pool not populated, copies will cause page faults why=\"{}\"",
                  to_string(fail_errno(errno, "populate the pool").value()));
        return;
      }
    }
  }

  std::atomic<bool> stop_{false};
  std::thread thread_;
};

PoolMapping::PoolMapping() noexcept = default;
PoolMapping::PoolMapping(std::span<std::byte> bytes) noexcept : bytes_(bytes) {}

Result<PoolMapping> PoolMapping::map(int fd, std::uint64_t size_bytes) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return fail_errno(errno, "fstat the pool's descriptor");
  if (size_bytes == 0 || static_cast<std::uint64_t>(info.st_size) != size_bytes) {
    return fail(Errc::kRefused, "the pool's descriptor has {} bytes, the server reports {}",
                info.st_size, size_bytes);
  }
  // Without these seals another process could truncate the memory, and a copy would cause SIGBUS.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || (seals & F_SEAL_GROW) == 0) {
    return fail(Errc::kRefused, "the pool is not sealed against a change of its size (seals {:#x})",
                seals);
  }
  void* const memory = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    return fail_errno(errno, "map a pool of " + format_bytes(size_bytes));
  }
  PoolMapping mapping(std::span(static_cast<std::byte*>(memory), size_bytes));
  if (::madvise(memory, size_bytes, MADV_DONTFORK) != 0) {
    return fail_errno(errno, "exclude the pool from child processes");
  }
  if (::madvise(memory, size_bytes, MADV_DONTDUMP) != 0) {
    return fail_errno(errno, "exclude the pool from core dumps");
  }
  return mapping;
}

PoolMapping::PoolMapping(PoolMapping&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})), population_(std::move(other.population_)) {}

PoolMapping& PoolMapping::operator=(PoolMapping&& other) noexcept {
  if (this != &other) {
    unmap();
    bytes_ = std::exchange(other.bytes_, {});
    population_ = std::move(other.population_);
  }
  return *this;
}

PoolMapping::~PoolMapping() { unmap(); }

void PoolMapping::unmap() noexcept {
  population_.reset();
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

void PoolMapping::populate() {
  PEGA_ASSERT(!population_, "a pool is populated twice");
  if (!bytes_.empty()) population_ = std::make_unique<Population>(bytes_);
}

void PoolMapping::wait_populated() {
  if (population_) population_->wait();
}

}  // namespace pegaflow
