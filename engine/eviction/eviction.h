#pragma once
/// \file
/// Which block goes next: one policy behind one interface.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engine/eviction/ghosts.h"
#include "engine/eviction/kind.h"
#include "engine/tables/block_row.h"
#include "engine/tables/index_list.h"

namespace pegaflow::engine {

/// Orders the rows that it was told of, and names victims among those at rest. Of a row it uses
/// `place`, `last_use` and `note`, and nothing else.
///
/// A row is sealed() once, then alternates between taken() and released(), is used_again() while it
/// is taken, and ends with freed() while it is at rest. Row numbers mean nothing to a policy: it
/// knows only those it was told of, so several can share one BlockRows.
///
/// Blocks of one chain are sealed and come to rest last block first. A block without its parent is
/// useless, so of two blocks that are otherwise equal the one that came to rest earlier goes first.
///
/// Each event takes constant time, amortized. Thread-bound.
class EvictionPolicy {
 public:
  enum class Freed : std::uint8_t {
    kEvicted,  ///< To make room: it was the policy's victim, and may come back.
    kDropped,  ///< Cleaned, or of a retired space.
  };

  /// A policy without rows. `rows` outlives it; no row in it is known to another policy.
  /// Errors: kOutOfCapacity when there is no memory for what the policy keeps beside the rows.
  static Result<std::unique_ptr<EvictionPolicy>> create(EvictionKind kind, BlockRows& rows,
                                                        std::uint32_t row_count);
  virtual ~EvictionPolicy() = default;
  EvictionPolicy(const EvictionPolicy&) = delete;
  EvictionPolicy& operator=(const EvictionPolicy&) = delete;

  /// A new block, at rest. `hash` is that of its name: the same each time the block comes.
  virtual void sealed(std::uint32_t row, std::uint32_t hash) = 0;
  /// Claimed, and so no longer at rest.
  virtual void taken(std::uint32_t row) = 0;
  /// Claimed once more while it is taken.
  virtual void used_again(std::uint32_t row) = 0;
  /// Held by nobody any more.
  virtual void released(std::uint32_t row) = 0;
  /// Gone; it was at rest.
  virtual void freed(std::uint32_t row, std::uint32_t hash, Freed why) = 0;

  /// The row to evict next, or kNone when none is at rest. The same until the next event.
  [[nodiscard]] virtual std::uint32_t victim() = 0;
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  /// Fetches what sealed() and freed() of a block of this name will touch beside its row.
  void prefetch(std::uint32_t hash) const {
    if (evicted_) evicted_->prefetch(hash);
  }
  /// Has one page of 4 KiB of what it keeps beside the rows come now; false beyond the last.
  bool touch(std::size_t page) { return evicted_ && evicted_->touch(page); }
  /// It is of no more use: gives `count` pages of that back; false beyond the last.
  bool forget(std::size_t page, std::size_t count) {
    return evicted_ && evicted_->forget(page, count);
  }
  /// Of what it keeps beside the rows.
  [[nodiscard]] std::uint64_t memory_bytes() const {
    return evicted_ ? evicted_->memory_bytes() : 0;
  }

  /// Rows at rest.
  [[nodiscard]] virtual std::uint32_t size() const = 0;
  /// `is_evictable` says what each row should be.
  /// Errors: kInternal that names the first broken invariant.
  [[nodiscard]] virtual Result<void> check(
      const std::function<bool(std::uint32_t)>& is_evictable) const = 0;

 protected:
  explicit EvictionPolicy(BlockRows& rows) : rows_(rows) {}
  EvictionPolicy(BlockRows& rows, EvictedBlocks evicted)
      : rows_(rows), evicted_(std::move(evicted)) {}

  BlockRows& rows_;
  std::optional<EvictedBlocks> evicted_;  ///< Of a policy that remembers them.
};

}  // namespace pegaflow::engine
