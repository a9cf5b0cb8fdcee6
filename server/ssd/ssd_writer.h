#pragma once
/// \file
/// Writes the blocks that are evicted next to the disks, ahead of their eviction.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

#include <kj/async-io.h>

#include "base/clock.h"
#include "engine/frames/block_listener.h"
#include "engine/ssd/write_budget.h"
#include "server/cache/cache_service.h"
#include "server/ssd/ssd_disks.h"

namespace pegaflow::server {

/// Keeps the next victims of the pool on the disks: the blocks that are evicted when `ahead` bytes
/// are saved. Blocks that a disk has, replicas, and what the budget does not allow are not written.
///
/// It holds no block: an eviction never waits for a disk. If the frame of a block that is being
/// written is evicted, the write is forgotten, and the block is lost as if there were no disk; it
/// is counted. Thread-bound: the RPC thread.
class SsdWriter final : public engine::BlockListener, private kj::TaskSet::ErrorHandler {
 public:
  struct Options {
    std::uint64_t budget_per_day = 0;  ///< Bytes; 0: no limit.
    /// Bytes; 0: the larger of 64 MiB and a 20th of the pool, and at most half of it.
    std::uint64_t ahead = 0;
  };

  /// All of them outlive it.
  SsdWriter(SsdDisks& disks, CacheService& service, std::span<std::byte> pool,
            const Options& options, kj::Timer& timer, const Clock& clock);
  ~SsdWriter() noexcept override;
  SsdWriter(const SsdWriter&) = delete;
  SsdWriter& operator=(const SsdWriter&) = delete;

  void sealed(engine::FrameIndex frame, From from) override;
  void dropped(engine::FrameIndex frame, bool is_evicted) override;

  /// Looks for blocks to write in the next event-loop iteration. To be called once a second:
  /// between these calls a few new blocks are not looked at.
  void poll() {
    is_due_ = true;
    wake();
  }
  /// From now on writes every block of the pool, the last used first; `done` is called when all are
  /// written. The budget applies.
  void drain(std::function<void()> done);
  /// Blocks that drain() has not written yet.
  [[nodiscard]] std::size_t left_to_drain() const noexcept {
    return wanted_.size() + writing_.size();
  }

  struct Stats {
    /// Blocks of engines evicted before they were written, or rejected for a reason below.
    std::uint64_t evicted_unwritten = 0;
    std::uint64_t rejected_budget = 0;
    std::uint64_t rejected_too_large = 0;
    std::uint64_t failed = 0;
    std::uint64_t forgotten = 0;  ///< Writes whose block was dropped meanwhile.
    std::uint64_t renewed = 0;  ///< Blocks written again because their segment is used again soon.
  };
  [[nodiscard]] const Stats& stats() const noexcept { return counted_; }

 private:
  struct Write {
    SsdDisk* disk = nullptr;
    SsdDisk::WriteId id = 0;
    std::uint64_t bytes = 0;
  };
  void wake();
  void run();
  void note_handled(engine::FrameIndex frame) {
    if (frame < unwritten_.size()) unwritten_[frame] = false;
  }
  void look_ahead();
  bool write(engine::FrameIndex frame);
  bool is_in_budget(engine::FrameIndex frame, const CacheService::Stored& block,
                    std::uint64_t bytes);
  void ended(engine::FrameIndex frame, SsdDisk::WriteId id, SsdDisk::Written written);
  void taskFailed(kj::Exception&& exception) override;

  SsdDisks& disks_;
  CacheService& service_;
  std::span<std::byte> pool_;
  engine::ssd::WriteBudget budget_;
  std::uint64_t ahead_bytes_;
  kj::Timer& timer_;
  const Clock& clock_;
  bool is_woken_ = false;
  bool is_due_ = false;      ///< A look ahead is due for the smallest change.
  std::size_t changes_ = 0;  ///< Blocks sealed since the last look ahead.
  std::size_t ahead_ = 0;    ///< Blocks that it saw.
  std::deque<engine::FrameIndex> wanted_;
  std::unordered_map<engine::FrameIndex, Write> writing_;
  std::vector<bool> unwritten_;  ///< By frame: a block that no disk has, and none has rejected.
  /// By frame: whether the budget has rejected its block, and rejected it after it was used.
  enum class Rejected : std::uint8_t { kNo, kUnused, kUsed };
  std::vector<Rejected> rejected_;
  std::uint64_t writing_bytes_ = 0;
  std::function<void()> drained_;
  Stats counted_;
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
