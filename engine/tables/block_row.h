#pragma once
/// \file
/// The store's record of one frame.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/block_key.h"
#include "base/error.h"
#include "engine/tables/index_list.h"
#include "engine/tables/prefetch.h"
#include "engine/tables/zero_pages.h"
#include "engine/types/ids.h"

namespace pegaflow::engine {

enum class FrameState : std::uint8_t {
  kFree = 0,
  kWritten,  ///< A reservation owns it. It is quarantined when that was forgotten.
  kSealed,   ///< Whole. Findable while its generation lives and its extent stays.
  kFetched,  ///< A fetch owns it, in flight or given up.
};

/// The state of a fetch: `owner` of a row that is kFetched.
enum class FetchState : std::uint32_t {
  kInFlight,  ///< The block may still arrive; it is in the index.
  kGivenUp,   ///< It will not arrive, and a device or peer may still write to the frame.
  kQuiesced,  ///< Nothing can write to it any longer; a claim still holds it.
};

/// Marks, as `owner`, a sealed row that was fetched. No writer has this tag.
inline constexpr std::uint32_t kReplica = 0;

/// The content of one frame; one cache line, which is all that most operations touch.
struct alignas(64) Block {
  BlockKey key;
  SpaceId space{};
  /// In the list of free frames of its extent; when sealed, in a list of its eviction policy.
  IndexLink place;
  std::uint32_t last_use = 0;  ///< BlockRows::uses() when it last became evictable.
  /// kWritten: the row of its reservation. kSealed: its writer's tag. kFetched: a FetchState.
  std::uint32_t owner = 0;
  std::uint32_t sealed_s = 0;      ///< When it was sealed, in the caller's seconds.
  std::uint32_t idle_since_s = 0;  ///< When it last became evictable; kSealed only.
  std::uint32_t holds : 25 = 0;    ///< Claims, pins and leases that contain it.
  std::uint32_t note : 4 = 0;  ///< The eviction policy's own; zero where no policy knows the row.
  FrameState state : 2 = FrameState::kFree;
  /// find() sees it. False for a forgotten block whose key was reserved again, for one whose fetch
  /// was given up, and for an invalidated one.
  bool indexed : 1 = false;
};
static_assert(sizeof(Block) == 64);
inline constexpr std::uint32_t kNoteMask = 0xF;
inline constexpr std::uint32_t kMaxHolds = (1U << 25) - 1;

/// The rows of all frames, and the count that tells their ages. Thread-bound.
class BlockRows {
 public:
  /// Errors: kOutOfCapacity.
  static Result<std::unique_ptr<BlockRows>> create(std::size_t count) {
    PEGA_TRY_LET(auto rows, ZeroPages<Block>::create(count));
    return std::unique_ptr<BlockRows>(new BlockRows(std::move(rows)));
  }

  [[nodiscard]] Block& operator[](std::uint32_t row) noexcept { return rows_[row]; }
  [[nodiscard]] const Block& operator[](std::uint32_t row) const noexcept { return rows_[row]; }

  /// The count of rows that became evictable; wraps around.
  [[nodiscard]] std::uint32_t uses() const noexcept { return uses_; }
  void stamp(std::uint32_t row) noexcept { rows_[row].last_use = ++uses_; }
  /// The count of rows that became evictable since this one did; at most 2^32 - 1.
  [[nodiscard]] std::uint32_t age(std::uint32_t row) const noexcept {
    return uses_ - rows_[row].last_use;
  }

  void prefetch(std::uint32_t row) const noexcept { prefetch_to_write(&rows_[row]); }
  void prefetch_to_read(std::uint32_t row) const noexcept {
    pegaflow::engine::prefetch_to_read(&rows_[row]);
  }
  /// Prefetches its neighbors in its list; call it once the row itself has arrived.
  void prefetch_neighbours(std::uint32_t row) const noexcept {
    const IndexLink& place = rows_[row].place;
    if (place.previous_plus_1 != 0) prefetch(place.previous_plus_1 - 1);
    if (place.next_plus_1 != 0) prefetch(place.next_plus_1 - 1);
  }
  /// These rows are no longer needed: their memory may be returned.
  void forget(std::size_t first, std::size_t count) noexcept { rows_.forget(first, count); }

 private:
  explicit BlockRows(ZeroPages<Block> rows) : rows_(std::move(rows)) {}

  ZeroPages<Block> rows_;
  std::uint32_t uses_ = 0;
};

}  // namespace pegaflow::engine
