#pragma once
/// \file
/// The memory of the pool: one sealed memfd that clients map too.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/os/unique_fd.h"
#include "engine/pool/placement.h"

namespace pegaflow::engine {

/// One memfd of fixed size, allocated, touched and sealed, mapped into this process.
///
/// Uses huge pages where enough are reserved, else tmpfs, on which it takes the huge pages that the
/// kernel finds (Collapse). Every page is present before create()
/// returns, so that no later access by this process or a client can fail (SIGBUS) or wait for the
/// kernel to find memory. The seals keep a client from shrinking it under the others.
///
/// Thread-bound; movable. The bytes themselves may be accessed from any thread, under the rules of
/// the block store.
class Pool {
 public:
  enum class HugePages : std::uint8_t {
    kIfReserved,  ///< Use them when enough are free.
    kRequired,    ///< Fail without them.
  };

  struct Options {
    std::uint64_t size_bytes = 0;  ///< Rounded down to whole pages.
    HugePages huge_pages = HugePages::kIfReserved;
    unsigned threads = 0;  ///< Threads that touch memory; 0: one per core.
    NumaPolicy numa = NumaPolicy::kOff;
    std::vector<NumaNode> numa_nodes{};  ///< See NumaTopology::memory_nodes(). Not used with kOff.
  };

  /// Called after each chunk, on one of the touching threads: keep it short and thread-safe.
  using Progress = std::function<void(std::uint64_t done_bytes, std::uint64_t size_bytes)>;

  /// Allocates and touches all memory; seconds for large pools. `stop` ends it early. With several
  /// NUMA nodes each part is touched by threads on its NUMA node's cores.
  /// Errors: kInvalidArgument for a size below one page; kOutOfCapacity when memory is short now (a
  /// previous server's pool may go, so a retry makes sense); kRefused when there will never be
  /// enough or huge pages are required and not reserved; kCancelled after `stop`; kIo when the
  /// kernel rejects another operation.
  static Result<Pool> create(const Options& options, const std::atomic<bool>& stop,
                             const Progress& progress);

  /// Maps the pool of another process, of `options.size_bytes` unless that is 0. Touches nothing.
  /// Errors: kRefused for memory of another size, or without the seals of a pool; kIo.
  static Result<Pool> adopt(UniqueFd fd, const Options& options);

  Pool(Pool&& other) noexcept;
  Pool& operator=(Pool&& other) noexcept;
  ~Pool();

  /// The descriptor to pass to clients; owned by the pool.
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return bytes_.size(); }
  /// The size of the memory's pages: 4 KiB on tmpfs, or that of reserved huge pages.
  [[nodiscard]] std::uint64_t page_bytes() const noexcept { return page_bytes_; }
  /// The bytes on huge pages; on tmpfs those that the kernel found without a reservation.
  [[nodiscard]] std::uint64_t huge_bytes() const noexcept { return huge_bytes_; }
  /// Sets the bytes of an adopted pool, as its maker found.
  void set_huge_bytes(std::uint64_t bytes) noexcept { huge_bytes_ = bytes; }
  /// The NUMA nodes of the pool, and why they are not as requested.
  [[nodiscard]] const PoolPlacement& placement() const noexcept { return placement_; }

 private:
  Pool(UniqueFd fd, std::span<std::byte> bytes, std::uint64_t page_bytes) noexcept;
  static Result<Pool> map(UniqueFd fd, std::uint64_t size_bytes, std::uint64_t page_bytes,
                          std::uint64_t collapsed_bytes);

  UniqueFd fd_;
  std::span<std::byte> bytes_;
  std::uint64_t page_bytes_ = 0;
  std::uint64_t huge_bytes_ = 0;
  PoolPlacement placement_;
};

/// Advice for an operator to get huge pages for the pool, as one sentence with the command. Empty
/// when the pool has them.
std::string huge_page_advice(const Pool& pool);

/// min(30 GiB, half of the free memory): the default of --pool-size. At least 64 MiB.
/// Errors: kIo when the kernel does not report the free memory.
Result<std::uint64_t> default_pool_bytes();

}  // namespace pegaflow::engine
