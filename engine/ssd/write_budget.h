#pragma once
/// \file
/// Which blocks are written to the disks of a node under a daily budget of bytes.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/block_key.h"
#include "base/clock.h"
#include "engine/eviction/ghosts.h"
#include "engine/types/depth.h"

namespace pegaflow::engine::ssd {

/// Spreads the budget over the day, and spends it on the blocks that are most likely to be read:
/// first those that were used since they were saved, then those that were rejected or evicted
/// before and are saved again, then new ones; among equals those near the start of their prompt,
/// because a block is of use only with all blocks before it.
///
/// It measures how many bytes of each rank are offered, and takes the ranks that the budget is
/// enough for. Of the first one that it is not enough for, a share is taken, in runs of
/// consecutive offers: half of the blocks of one prompt are of little use. A bucket of tokens is
/// the limit in any case: it starts with half an hour of the budget and holds an hour of it; what
/// is in it beyond a half is spent within an hour. Thread-bound.
class WriteBudget {
 public:
  /// `bytes_per_day` 0: no limit, and no memory. Else 4 MiB to remember rejected blocks; if there
  /// is no memory for that, none is remembered.
  WriteBudget(std::uint64_t bytes_per_day, TimePoint now);

  struct Offer {
    BlockKey key{};
    std::uint64_t bytes = 0;
    bool was_used = false;   ///< Since it was saved, or read from a disk.
    bool came_back = false;  ///< Known to have been evicted and saved again.
    Depth depth = kUnknownDepth;
  };
  /// Whether the block is to be written; its bytes are spent then. Each block is offered once while
  /// it is in the pool, and once more if it is used after that: a rejected block that is offered
  /// again counts as one that came back.
  bool take(const Offer& offer, TimePoint now);
  /// Spends the bytes of a block whatever its rank. False: the bucket is empty.
  bool take_last(std::uint64_t bytes, TimePoint now);

  [[nodiscard]] bool is_limited() const noexcept { return rate_ != 0; }

  /// 0: used; 1 to 7: saved again, by depth; 8 to 14: new, by depth.
  using Rank = std::uint8_t;
  static constexpr std::size_t kRanks = 2 * kMostDepth + 1;
  /// Blocks of lower ranks are taken, those of higher ones rejected. kRanks: all are taken.
  [[nodiscard]] Rank limit() const noexcept { return limit_; }
  /// The share of the blocks of the rank limit() that are taken.
  [[nodiscard]] double share() const noexcept { return share_; }

 private:
  [[nodiscard]] double burst() const { return rate_ * 3600; }
  void fill(TimePoint now);
  void adjust(double seconds);
  [[nodiscard]] bool is_wanted(Rank rank);

  double rate_;  ///< Bytes a second.
  double tokens_;
  TimePoint filled_at_;
  TimePoint adjusted_at_;
  double observed_s_ = 0;                 ///< The time of `offered_`, older times counted less.
  std::array<double, kRanks> offered_{};  ///< Bytes, by rank.
  Rank limit_ = kRanks;
  double share_ = 1;
  double credit_ = 0;  ///< Blocks of the rank `limit_` that may be taken in the next run.
  bool is_in_run_ = false;
  std::optional<EvictedBlocks> rejected_;
};

}  // namespace pegaflow::engine::ssd
