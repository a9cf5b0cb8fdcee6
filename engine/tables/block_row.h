#pragma once
/// \file
/// The store's record of one frame.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "base/block_key.h"
#include "base/error.h"
#include "engine/tables/index_list.h"
#include "engine/tables/prefetch.h"
#include "engine/tables/zero_pages.h"
#include "engine/types/depth.h"
#include "engine/types/ids.h"

namespace pegaflow::engine {

enum class FrameState : std::uint8_t {
  kFree = 0,
  kWritten,  ///< A reservation owns it; quarantined once that reservation is forgotten.
  kSealed,   ///< Complete; findable unless invalidated, reset, or in an extent that is leaving.
  kFetched,  ///< A fetch owns it: see FetchState.
};

/// The state of a fetch, kept in `owner` of a row that is kFetched.
enum class FetchState : std::uint32_t {
  kInFlight,  ///< The block may still arrive; it is in the index.
  kGivenUp,   ///< It will not arrive, and a device or peer may still write to the frame.
  kQuiesced,  ///< Nothing can write to it any longer; a claim still holds it.
};

/// The `owner` of a sealed block that was fetched from another node. No writer has this tag.
inline constexpr std::uint32_t kReplica = 0;
/// The same of one that was restored from a disk of this node. No writer has this tag.
inline constexpr std::uint32_t kRestored = 1;

/// The row of one frame: its block and its state. One cache line, and most operations touch no
/// other.
struct alignas(64) Block {
  BlockKey key;
  SpaceId space{};
  /// Its link in the list of free frames of its extent or, when sealed, in one of the eviction
  /// policy.
  IndexLink place;
  std::uint32_t last_use = 0;  ///< BlockRows::uses() when it last became evictable.
  /// kWritten: the row of its reservation. kSealed: its writer's tag. kFetched: a FetchState.
  std::uint32_t owner = 0;
  std::uint32_t sealed_s = 0;      ///< When it was sealed, in seconds by the caller's clock.
  std::uint32_t idle_since_s = 0;  ///< When it last became evictable; kSealed only.
  std::uint32_t holds : 21 = 0;    ///< Claims, pins and leases that contain it.
  std::uint32_t depth : 3 = 0;     ///< A Depth, as its first writer gave it.
  std::uint32_t used : 1 = 0;      ///< It was held after it was sealed.
  std::uint32_t note : 4 = 0;      ///< For the eviction policy; 0 while no policy has the row.
  FrameState state : 2 = FrameState::kFree;
  /// The index has an entry for it. False for a forgotten block whose key was reserved again, for a
  /// block whose fetch was given up, and for an invalidated block.
  bool indexed : 1 = false;
};
static_assert(sizeof(Block) == 64);
inline constexpr std::uint32_t kNoteMask = 0xF;
inline constexpr std::uint32_t kMaxHolds = (1U << 21) - 1;

/// The rows of all frames, and the counter from which their ages follow. Thread-bound.
class BlockRows {
 public:
  /// Errors: kOutOfCapacity.
  static Result<std::unique_ptr<BlockRows>> create(std::size_t count) {
    PEGA_TRY_LET(auto rows, ZeroPages<Block>::create(count));
    return std::unique_ptr<BlockRows>(new BlockRows(std::move(rows), nullptr));
  }
  /// The same in memory that outlives this process, as does the counter.
  static std::unique_ptr<BlockRows> shared(std::span<Block> rows, std::uint32_t& uses) {
    return std::unique_ptr<BlockRows>(new BlockRows(ZeroPages<Block>::shared(rows), &uses));
  }

  [[nodiscard]] Block& operator[](std::uint32_t row) noexcept { return rows_[row]; }
  [[nodiscard]] const Block& operator[](std::uint32_t row) const noexcept { return rows_[row]; }

  /// The number of times that a row became evictable; wraps around.
  [[nodiscard]] std::uint32_t uses() const noexcept { return *uses_; }
  /// Makes all rows older, as if so many others had become evictable.
  void pass(std::uint32_t uses) noexcept { *uses_ += uses; }
  void stamp(std::uint32_t row) noexcept { rows_[row].last_use = ++*uses_; }
  /// The number of times that a row became evictable since this one did; at most 2^32 - 1.
  [[nodiscard]] std::uint32_t age(std::uint32_t row) const noexcept {
    return *uses_ - rows_[row].last_use;
  }

  void prefetch(std::uint32_t row) const noexcept { prefetch_to_write(&rows_[row]); }
  void prefetch_to_read(std::uint32_t row) const noexcept {
    pegaflow::engine::prefetch_to_read(&rows_[row]);
  }
  /// Prefetches the row's neighbors in its list. Call it once the row itself is in the cache.
  void prefetch_neighbours(std::uint32_t row) const noexcept {
    const IndexLink& place = rows_[row].place;
    if (place.previous_plus_1 != 0) prefetch(place.previous_plus_1 - 1);
    if (place.next_plus_1 != 0) prefetch(place.next_plus_1 - 1);
  }
  /// Returns the memory of rows that are no longer needed to the kernel, in whole pages.
  void forget(std::size_t first, std::size_t count) noexcept { rows_.forget(first, count); }

 private:
  BlockRows(ZeroPages<Block> rows, std::uint32_t* uses)
      : rows_(std::move(rows)), uses_(uses == nullptr ? &own_uses_ : uses) {}

  ZeroPages<Block> rows_;
  std::uint32_t own_uses_ = 0;
  std::uint32_t* uses_;
};

}  // namespace pegaflow::engine
