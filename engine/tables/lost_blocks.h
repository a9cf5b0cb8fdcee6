#pragma once
/// \file
/// Why blocks are missing, and how long lost blocks had lived.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "engine/tables/prefetch.h"
#include "engine/tables/zero_pages.h"

namespace pegaflow::engine {

/// Why a lookup did not find a block.
enum class Miss : std::uint8_t {
  kNew = 0,     ///< Never seen, or lost too long ago to be remembered.
  kEvicted,     ///< Evicted to make room.
  kCleaned,     ///< Evicted by a cleanup.
  kReset,       ///< Dropped with its generation.
  kNoRoom,      ///< A save offered it, and no frame could be freed, or the policy refused it.
  kSaveFailed,  ///< A save began and was abandoned or forgotten, or its writer was lost.
  kCorrupt,     ///< Its bytes were wrong.
  kDiskFailed,  ///< A disk had it, and did not deliver it.
  kBeingSaved,  ///< Its save is in progress.
  kBehindHole,  ///< It is present, but of no use: a block before it is missing.
  kInFlight,    ///< It is being fetched.
  kOtherTier,   ///< A disk or another node has it, and offers it in place of the pool.
};
inline constexpr std::size_t kMissCount = static_cast<std::size_t>(Miss::kOtherTier) + 1;
using MissCounts = std::array<std::uint64_t, kMissCount>;

constexpr std::string_view to_string(Miss why) noexcept {
  constexpr std::array<std::string_view, kMissCount> kNames = {
      "new",     "evicted",     "cleanup",     "reset",       "no_room", "save_failed",
      "corrupt", "disk_failed", "being_saved", "behind_hole", "coming",  "other_tier"};
  return kNames[static_cast<std::size_t>(why)];
}

/// Remembers why recently lost blocks were lost, by a hash of their names: for counters only.
///
/// 4 bytes per block, each in one cell, which the next loss that falls there overwrites: a block
/// survives n later losses with a probability of exp(-n / cells). A block is mistaken for another
/// once in 2^29. Fixed size. Thread-bound.
class LostBlocks {
 public:
  /// Errors: kOutOfCapacity.
  static Result<LostBlocks> create(std::uint32_t places) {
    PEGA_TRY_LET(auto cells, ZeroPages<std::uint32_t>::create(
                                 std::bit_ceil(std::max<std::size_t>(places, 1)), PageUse::kDense));
    // Losses fall anywhere: without this the first 512 would be 512 page faults, a millisecond.
    cells.touch();
    return LostBlocks(std::move(cells));
  }

  /// `hash` has 64 good bits; `why` is kEvicted to kDiskFailed.
  void remember(std::uint64_t hash, Miss why) noexcept {
    cells_[place(hash)] = tag(hash) | static_cast<std::uint32_t>(why);
  }
  /// kNew when it is not remembered.
  [[nodiscard]] Miss why(std::uint64_t hash) const noexcept {
    const std::uint32_t cell = cells_[place(hash)];
    return (cell & ~kReason) == tag(hash) ? static_cast<Miss>(cell & kReason) : Miss::kNew;
  }
  void prefetch(std::uint64_t hash) const noexcept { prefetch_to_read(&cells_[place(hash)]); }

  [[nodiscard]] std::uint64_t memory_bytes() const noexcept { return cells_.size_bytes(); }

 private:
  static constexpr std::uint32_t kReason = 7;  ///< The low bits of a cell; 0 is an empty one.
  static_assert(static_cast<std::uint32_t>(Miss::kDiskFailed) <= kReason);

  explicit LostBlocks(ZeroPages<std::uint32_t> cells) noexcept : cells_(std::move(cells)) {}
  [[nodiscard]] std::size_t place(std::uint64_t hash) const noexcept {
    return hash & (cells_.size() - 1);
  }
  /// Taken from the other end of the hash than the place.
  static std::uint32_t tag(std::uint64_t hash) noexcept {
    return static_cast<std::uint32_t>(hash >> 32) & ~kReason;
  }

  ZeroPages<std::uint32_t> cells_;
};

/// Counts blocks by their age. A plain value.
struct AgeHistogram {
  /// Upper bounds in seconds, up to a week; the last bucket has none.
  static constexpr std::array<double, 12> kBounds = {1,    10,   60,    300,   900,   1800,
                                                     3600, 7200, 21600, 43200, 86400, 604800};

  std::array<std::uint64_t, kBounds.size() + 1> counts{};
  double sum_seconds = 0;

  void record(std::uint32_t seconds) noexcept {
    std::size_t bucket = 0;
    while (bucket < kBounds.size() && seconds > kBounds[bucket]) ++bucket;
    ++counts[bucket];
    sum_seconds += seconds;
  }
};

}  // namespace pegaflow::engine
