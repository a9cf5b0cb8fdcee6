#pragma once
/// \file
/// Which block is evicted next: one interface for all policies.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/eviction/ghosts.h"
#include "engine/eviction/kind.h"
#include "engine/eviction/policy_memory.h"
#include "engine/tables/block_row.h"
#include "engine/tables/index_list.h"

namespace pegaflow::engine {

/// Orders the rows that it was given, and chooses victims among the evictable ones. Uses only
/// `place`, `last_use` and `note` of a row.
///
/// A row is sealed() once, then alternates between taken() and released(), is used_again() while it
/// is taken, and ends with freed() while it is evictable. Row numbers have no meaning for a policy,
/// and it knows only the rows that it was given, so several policies can share one BlockRows.
///
/// The blocks of a chain are sealed and become evictable last block first. A block without its
/// parent is useless, so of two otherwise equal blocks the one that became evictable earlier is
/// evicted first.
///
/// Each event takes constant time, amortized. Thread-bound.
class EvictionPolicy {
 public:
  enum class Freed : std::uint8_t {
    kEvicted,  ///< To make room: it was the policy's victim, and may be requested again.
    kDropped,  ///< Cleaned, or of a retired generation.
  };

  /// Creates a policy without rows. `rows` outlives it; none of its rows is known to another
  /// policy. `memory`: for what the policy remembers; in kept memory it continues with what one of
  /// the same kind and size left there.
  /// Errors: kOutOfCapacity when there is no memory for the policy's own data.
  static Result<std::unique_ptr<EvictionPolicy>> create(EvictionKind kind, BlockRows& rows,
                                                        std::uint32_t row_count,
                                                        PolicyMemory memory = {});
  virtual ~EvictionPolicy() = default;
  EvictionPolicy(const EvictionPolicy&) = delete;
  EvictionPolicy& operator=(const EvictionPolicy&) = delete;

  /// A new block, evictable. `hash` is the hash of its name: the same each time the block is saved.
  virtual void sealed(std::uint32_t row, std::uint32_t hash) = 0;
  /// The same for a block of a former process, whose policy, of this kind or another one, left
  /// `note` in its row. The one that became evictable first comes first.
  virtual void adopted(std::uint32_t row, std::uint32_t hash, std::uint32_t note) {
    (void)note;
    sealed(row, hash);
  }
  /// The row was claimed, and so is no longer evictable.
  virtual void taken(std::uint32_t row) = 0;
  /// The row was claimed once more while it is taken.
  virtual void used_again(std::uint32_t row) = 0;
  /// The last claim, pin or lease on the row ended.
  virtual void released(std::uint32_t row) = 0;
  /// The row is gone; it was evictable.
  virtual void freed(std::uint32_t row, std::uint32_t hash, Freed why) = 0;

  /// A claim of rows begins, or a save, which will offer blocks to refuses() if `may_refuse`. Time
  /// passes for a policy that refused blocks before: they count as uses in the ages of the others,
  /// and BlockRows::uses() moves.
  virtual void claim_begins() {}
  virtual void save_begins(bool /*may_refuse*/) {}
  /// A new block is offered, and victim() would have to leave for it. Returns true if that one is
  /// worth more: the new block is not saved, and nothing is evicted. All blocks of one save meet
  /// the same ages, so a chain is refused from some block on.
  virtual bool refuses(std::uint32_t /*hash*/) { return false; }

  /// The row to evict next, or kNone when none is evictable. The same until the next event.
  [[nodiscard]] virtual std::uint32_t victim() = 0;
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  /// Appends the next victims, at most `most`, as if nothing happened in between: a forecast, exact
  /// for lists. Changes nothing. O(most).
  virtual void next_victims(std::size_t most, std::vector<std::uint32_t>& rows) const = 0;

  /// Prefetches what sealed() and freed() of a block of this name will touch beside its row.
  void prefetch(std::uint32_t hash) const {
    if (evicted_) evicted_->prefetch(hash);
  }
  /// Allocates one page of 4 KiB of the policy's own memory now; returns false beyond the last.
  bool touch(std::size_t page) { return evicted_ && evicted_->touch(page); }
  /// Returns `count` pages of the policy's own memory, once it is no longer used; returns false
  /// beyond the last.
  bool forget(std::size_t page, std::size_t count) {
    return evicted_ && evicted_->forget(page, count);
  }
  /// The policy's own memory, without the rows.
  [[nodiscard]] virtual std::uint64_t memory_bytes() const {
    return evicted_ ? evicted_->memory_bytes() : 0;
  }

  /// The count of evictable rows.
  [[nodiscard]] virtual std::uint32_t size() const = 0;
  /// `is_evictable` returns the expected state of each row.
  /// Errors: kInternal that names the first broken invariant.
  [[nodiscard]] virtual Result<void> check(
      const std::function<bool(std::uint32_t)>& is_evictable) const = 0;

 protected:
  explicit EvictionPolicy(BlockRows& rows) : rows_(rows) {}
  EvictionPolicy(BlockRows& rows, EvictedBlocks evicted)
      : rows_(rows), evicted_(std::move(evicted)) {}

  BlockRows& rows_;
  std::optional<EvictedBlocks> evicted_;  ///< Only for a policy that remembers them.
};

}  // namespace pegaflow::engine
