#pragma once
/// \file
/// The memory that blocks live in: one sealed memfd that clients map too.

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
/// On huge pages where enough are reserved, else on tmpfs. Every page is there before create()
/// returns, so that no access of ours or of a client can fail later (SIGBUS) or wait for the kernel
/// to find memory. The seals keep a client from shrinking it under the others.
///
/// Thread-bound; movable. The bytes themselves may be touched from any thread, under the rules of
/// the block store.
class Pool {
 public:
  enum class HugePages : std::uint8_t {
    kIfReserved,  ///< Use them when enough are free.
    kRequired,    ///< Fail without.
  };

  struct Options {
    std::uint64_t size_bytes = 0;  ///< Rounded down to whole pages.
    HugePages huge_pages = HugePages::kIfReserved;
    unsigned threads = 0;  ///< That touch memory; 0: one a core.
    NumaPolicy numa = NumaPolicy::kOff;
    std::vector<NumaNode> numa_nodes{};  ///< See NumaTopology::memory_nodes(). Not used with kOff.
  };

  /// Told after each chunk, on one of the touching threads, so keep it short and thread-safe.
  using Progress = std::function<void(std::uint64_t done_bytes, std::uint64_t size_bytes)>;

  /// Allocates and touches everything; seconds for large pools. `stop` ends it early. With several
  /// nodes of memory each part is touched by threads on its node's cores.
  /// Errors: kInvalidArgument for a size below one page; kOutOfCapacity when memory is short now
  /// (a previous server's pool may go, so trying again makes sense); kRefused when there will never
  /// be enough or huge pages are required and not reserved; kCancelled after `stop`; kIo when the
  /// kernel refuses something else.
  static Result<Pool> create(const Options& options, const std::atomic<bool>& stop,
                             const Progress& progress);

  Pool(Pool&& other) noexcept;
  Pool& operator=(Pool&& other) noexcept;
  ~Pool();

  /// To hand to clients; stays ours.
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return bytes_.size(); }
  /// Of the memory's pages: 4 KiB, or the size of huge ones.
  [[nodiscard]] std::uint64_t page_bytes() const noexcept { return page_bytes_; }
  /// On which nodes it lies, and why not as was asked for.
  [[nodiscard]] const PoolPlacement& placement() const noexcept { return placement_; }

 private:
  Pool(UniqueFd fd, std::span<std::byte> bytes, std::uint64_t page_bytes) noexcept;

  UniqueFd fd_;
  std::span<std::byte> bytes_;
  std::uint64_t page_bytes_ = 0;
  PoolPlacement placement_;
};

/// What an operator can do to get huge pages for a pool of `size_bytes`, as one sentence with the
/// command. Empty when the pool has them.
std::string huge_page_advice(const Pool& pool);

/// min(30 GiB, half of what is free now): the default of --pool-size. At least 64 MiB.
/// Errors: kIo when the kernel does not say what is free.
Result<std::uint64_t> default_pool_bytes();

}  // namespace pegaflow::engine
