#pragma once
/// \file
/// The disks of the SSD tier together.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/os/mailbox.h"
#include "server/ssd/ssd_disk.h"
#include "transport/disk/open_disk.h"

namespace pegaflow::server {

/// The completion of one of several disks.
struct SsdNews {
  std::size_t disk = 0;
  Disk::Completion completion{};
};

/// Opens the disks and deals blocks to them. A disk that fails loses its own blocks only.
/// Thread-bound: the RPC thread.
class SsdDisks {
 public:
  struct Options {
    std::vector<std::string> paths;    ///< Files or directories, at least one.
    std::uint64_t capacity_bytes = 0;  ///< The sum over all disks.
    std::uint64_t segment_bytes = std::uint64_t{128} << 20;
    DiskBackend backend = DiskBackend::kAuto;
    bool format = false;
    /// The memory of the indexes of all disks together, in equal parts; 0: no limit.
    std::uint64_t index_bytes = 0;
    Duration lock_wait = std::chrono::seconds(30);
    std::vector<std::span<std::byte>> huge_memory;  ///< See DiskOptions.
  };

  /// Opens, creates or refuses the files; blocks until their locks are free, and for a few reads
  /// and writes. `clock` outlives the result. Errors: those of open_disk() and SsdDisk::open();
  /// kInvalidArgument for a capacity that is too small.
  static Result<std::unique_ptr<SsdDisks>> open(const Options& options, const Clock& clock);

  /// Waits for all I/O; every job ends. No disk is left.
  void close();

  /// Once it is readable, call read_completions().
  [[nodiscard]] Mailbox<SsdNews>& completions() noexcept { return completions_; }
  /// Returns how many there were.
  std::size_t read_completions();

  [[nodiscard]] const std::vector<std::unique_ptr<SsdDisk>>& all() const noexcept { return disks_; }
  /// The files, as they were opened.
  [[nodiscard]] const std::vector<std::string>& paths() const noexcept { return paths_; }
  /// The disk that has the block; null: none has.
  [[nodiscard]] SsdDisk* having(const engine::ssd::Origin& origin, const BlockKey& key) const;
  /// Whether a disk has the block, and is not asked for it because it is slow.
  [[nodiscard]] bool hide(const engine::ssd::Origin& origin, const BlockKey& key) const;
  /// The disk that takes the next block: the one with the fewest bytes waiting and, of those, with
  /// the fewest bytes written; null: none does now.
  [[nodiscard]] SsdDisk* taking() const;
  /// Whether a block may be found.
  [[nodiscard]] bool may_read() const;
  [[nodiscard]] bool is_scanning() const;

 private:
  explicit SsdDisks(std::size_t capacity) : completions_(capacity) {}

  Mailbox<SsdNews> completions_;
  std::vector<std::unique_ptr<SsdDisk>> disks_;
  std::vector<std::string> paths_;
};

}  // namespace pegaflow::server
