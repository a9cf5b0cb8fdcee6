#pragma once
/// \file
/// Requests that keep a Disk busy, for measurements.

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "harness/engine_memory.h"
#include "perf/disk/fio.h"
#include "transport/disk/disk.h"
#include "transport/disk/open_disk.h"

namespace pegaflow::perf {

struct DiskLoad {
  Disk::Operation operation = Disk::Operation::kRead;
  std::uint64_t block_bytes = 0;
  std::uint64_t total_bytes = 0;
  bool sequential = false;     ///< Otherwise at random multiples of `block_bytes`.
  bool hashed = false;         ///< With XXH3-64 of each block on the disk's thread.
  bool beside_writes = false;  ///< While writes of 1 MiB are always waiting.
};

/// An open Disk, with memory for twice the bytes that it may have in flight, so that its queue is
/// never empty. Thread-bound.
class LoadedDisk {
 public:
  /// Errors: those of open_disk(); the kernel's without memory.
  static Result<std::unique_ptr<LoadedDisk>> open(const DiskOptions& options, std::uint64_t seed);
  LoadedDisk(const LoadedDisk&) = delete;
  LoadedDisk& operator=(const LoadedDisk&) = delete;

  /// Errors: that of the first request that failed.
  Result<DiskRate> run(const DiskLoad& load);
  /// Writes the whole file once and flushes it: what was never written is read without the device.
  Result<void> fill();
  [[nodiscard]] Disk& disk() { return *disk_; }

 private:
  LoadedDisk(harness::Mapping memory, std::uint64_t seed)
      : memory_(std::move(memory)), random_(seed) {}
  Result<void> submit(const DiskLoad& load, std::uint64_t slot);
  Result<void> submit_write(std::uint64_t slot);
  std::vector<Disk::Completion> take();
  Result<void> drain(std::uint64_t open);

  harness::Mapping memory_;
  std::mt19937_64 random_;
  std::uint64_t next_block_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Disk::Completion> completions_;
  std::unique_ptr<Disk> disk_;
};

}  // namespace pegaflow::perf
