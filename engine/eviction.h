#pragma once
/// \file
/// Which block goes next: one policy behind one interface.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "engine/index_list.h"
#include "engine/zero_pages.h"

namespace pegaflow {

enum class EvictionKind : std::uint8_t {
  kLru,          ///< The block longest at rest.
  kSlru,         ///< New blocks before those that were used again.
  kS3Fifo,       ///< New blocks that nobody used while they passed a small queue.
  kWeightedLru,  ///< The block longest at rest for the uses that it had.
};

/// The name of a policy, as options, logs and metrics say it.
[[nodiscard]] std::string_view to_string(EvictionKind kind);
/// Errors: kInvalidArgument that lists the names there are.
Result<EvictionKind> eviction_kind(std::string_view name);
/// All names, for people: "a, b or c".
[[nodiscard]] std::string eviction_names();
inline constexpr std::array kEvictionKinds = {EvictionKind::kWeightedLru, EvictionKind::kLru,
                                              EvictionKind::kSlru, EvictionKind::kS3Fifo};
/// Above LRU wherever it was measured, or within 2 % of it; see docs/decisions/0006.
inline constexpr EvictionKind kDefaultEviction = EvictionKind::kWeightedLru;

/// What a policy remembers of one row. A row is a block's, sealed, or nobody's.
struct EvictionRow {
  IndexLink place;             ///< In whichever list of its policy the row is; zero while taken.
  std::uint32_t last_use = 0;  ///< EvictionRows::uses() when it last came to rest.
  std::uint32_t note = 0;      ///< The policy's own; zero in a row that no policy knows.
};
static_assert(sizeof(EvictionRow) == 16);

/// The rows of all policies that share one array of blocks, with the count that tells their ages.
/// Thread-bound.
class EvictionRows {
 public:
  /// Errors: kOutOfCapacity.
  static Result<std::unique_ptr<EvictionRows>> create(std::size_t count);

  [[nodiscard]] EvictionRow& operator[](std::uint32_t row) noexcept { return rows_[row]; }
  [[nodiscard]] const EvictionRow& operator[](std::uint32_t row) const noexcept {
    return rows_[row];
  }
  /// How often a row came to rest, in any policy; wraps around.
  [[nodiscard]] std::uint32_t uses() const noexcept { return uses_; }
  void stamp(std::uint32_t row) noexcept { rows_[row].last_use = ++uses_; }
  /// How many rows came to rest since this one did; at most 2^32 - 1.
  [[nodiscard]] std::uint32_t age(std::uint32_t row) const noexcept {
    return uses_ - rows_[row].last_use;
  }

  /// Fetches what an event of this row will touch; the second, those beside it in its list, once
  /// the first has arrived.
  void prefetch(std::uint32_t row) const noexcept { __builtin_prefetch(&rows_[row], 1); }
  void prefetch_neighbours(std::uint32_t row) const noexcept {
    const IndexLink& place = rows_[row].place;
    if (place.previous_plus_1 != 0) prefetch(place.previous_plus_1 - 1);
    if (place.next_plus_1 != 0) prefetch(place.next_plus_1 - 1);
  }

  [[nodiscard]] std::uint64_t memory_bytes() const noexcept { return rows_.size_bytes(); }

 private:
  explicit EvictionRows(ZeroPages<EvictionRow> rows) : rows_(std::move(rows)) {}

  ZeroPages<EvictionRow> rows_;
  std::uint32_t uses_ = 0;
};

/// Orders the rows that it was told of, and names victims among those at rest.
///
/// A row is sealed() once, then alternates between taken() and rested(), is used_again() while it
/// is taken, and ends with freed() while it is at rest. Row numbers mean nothing to a policy: it
/// knows only those it was told of, so several can share one EvictionRows.
///
/// Blocks of one chain are sealed and come to rest last block first. A block without its parent is
/// useless, so of two blocks that are otherwise equal the one that came to rest earlier goes first.
///
/// Each event takes constant time, amortized. All memory is there from the start. Thread-bound.
class EvictionPolicy {
 public:
  enum class Freed : std::uint8_t {
    kEvicted,  ///< To make room: it was the policy's victim, and may come back.
    kDropped,  ///< Cleaned, or of a retired space.
  };

  /// A policy without rows. `rows` outlives it; no row in it is known to another policy.
  /// Errors: kOutOfCapacity when there is no memory for what the policy keeps beside the rows.
  static Result<std::unique_ptr<EvictionPolicy>> create(EvictionKind kind, EvictionRows& rows,
                                                        std::uint32_t row_count);
  virtual ~EvictionPolicy() = default;

  /// A new block, at rest. `hash` is that of its name: the same each time the block comes.
  virtual void sealed(std::uint32_t row, std::uint32_t hash) = 0;
  /// Claimed, and so no longer at rest.
  virtual void taken(std::uint32_t row) = 0;
  /// Claimed once more while it is taken.
  virtual void used_again(std::uint32_t row) = 0;
  /// Held by nobody any more.
  virtual void rested(std::uint32_t row) = 0;
  /// Gone; it was at rest.
  virtual void freed(std::uint32_t row, std::uint32_t hash, Freed why) = 0;

  /// The row to evict next, or kNone when none is at rest. The same until the next event.
  [[nodiscard]] virtual std::uint32_t victim() = 0;
  /// The rows that will probably go next, for fetching them ahead; returns how many it wrote.
  virtual std::size_t victims(std::span<std::uint32_t> out) const = 0;
  /// Fetches what sealed() and freed() of a block of this name will touch beside its row.
  virtual void prefetch(std::uint32_t /*hash*/) const {}
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  /// Rows at rest.
  [[nodiscard]] virtual std::uint32_t size() const = 0;
  /// Of what it keeps beside the rows.
  [[nodiscard]] virtual std::uint64_t memory_bytes() const = 0;
  /// `is_at_rest` says what each row should be.
  /// Errors: kInternal that names the first broken invariant.
  [[nodiscard]] virtual Result<void> check(
      const std::function<bool(std::uint32_t)>& is_at_rest) const = 0;
};

}  // namespace pegaflow
