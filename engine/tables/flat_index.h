#pragma once
/// \file
/// The hash index of all tables of the store: flat, of fixed size, with deletion.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "base/error.h"
#include "engine/tables/prefetch.h"
#include "engine/tables/zero_pages.h"

namespace pegaflow::engine {

/// Maps 32-bit hashes to 32-bit row numbers; the keys of the rows are known to the caller only.
///
/// Open addressing with linear probing, at most half full, 8 bytes per cell. A cell keeps the whole
/// hash: most other rows are distinguished without touching them, and deletion can shift cells back
/// without looking at any row. There are no tombstones, so years of churn do not slow it down. The
/// index never grows; its owner inserts no more rows than it was made for.
class FlatIndex {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  /// `max_rows` is at most 2^31, so that 32 bits of hash name every cell. Use kDense when all of it
  /// will be touched.
  /// Errors: kOutOfCapacity.
  static Result<FlatIndex> create(std::uint32_t max_rows, PageUse use = PageUse::kSparse) {
    const std::uint64_t cells =
        std::bit_ceil(std::max<std::uint64_t>(std::uint64_t{max_rows} * 2, 2));
    PEGA_TRY_LET(auto table, ZeroPages<Cell>::create(cells, use));
    return FlatIndex(std::move(table));
  }

  /// The row with this hash for which `equal(row)` is true, or kNone.
  template <typename Equal>
  [[nodiscard]] std::uint32_t find(std::uint32_t hash, Equal&& equal) const {
    for (std::uint32_t at = hash & mask_; cells_[at].row_plus_1 != 0; at = (at + 1) & mask_) {
      if (cells_[at].hash == hash && equal(cells_[at].row_plus_1 - 1)) {
        return cells_[at].row_plus_1 - 1;
      }
    }
    return kNone;
  }

  /// `row` is not in the index.
  void insert(std::uint32_t hash, std::uint32_t row) noexcept {
    std::uint32_t at = hash & mask_;
    while (cells_[at].row_plus_1 != 0) at = (at + 1) & mask_;
    cells_[at] = {hash, row + 1};
    ++size_;
  }

  /// False when `row` is not there.
  bool erase(std::uint32_t hash, std::uint32_t row) noexcept {
    std::uint32_t hole = hash & mask_;
    while (cells_[hole].row_plus_1 != row + 1) {
      if (cells_[hole].row_plus_1 == 0) return false;
      hole = (hole + 1) & mask_;
    }
    // Shift back what lies behind the hole and would no longer be reached across it.
    for (std::uint32_t at = (hole + 1) & mask_; cells_[at].row_plus_1 != 0; at = (at + 1) & mask_) {
      const std::uint32_t from_home = (at - (cells_[at].hash & mask_)) & mask_;
      const std::uint32_t from_hole = (at - hole) & mask_;
      if (from_home >= from_hole) {
        cells_[hole] = cells_[at];
        hole = at;
      }
    }
    cells_[hole] = {};
    --size_;
    return true;
  }

  /// Allocates the memory of one page of 4 KiB now; returns false beyond the last page. Each hash
  /// touches its own page: without this the first 512 insertions into 16 MiB are 512 page faults,
  /// more than a millisecond in one call.
  bool touch(std::size_t page) noexcept { return cells_.touch(page, 1); }

  /// Returns the memory of `count` pages from `page` on, once the index is no longer used; returns
  /// false beyond the last page.
  bool forget(std::size_t page, std::size_t count) noexcept {
    return cells_.forget_pages(page, count);
  }

  void prefetch(std::uint32_t hash) const noexcept { prefetch_to_read(&cells_[hash & mask_]); }
  /// Prefetches for a hash that most likely is absent, or will be erased: its walk ends at an empty
  /// cell, which at half full lies behind the first cache line in one of four cases.
  void prefetch_walk(std::uint32_t hash) const noexcept {
    prefetch(hash);
    prefetch(hash + kUsualWalk);
  }
  /// The row that find() will look at first, or kNone; for prefetching it. This is not simply the
  /// row of the first cell: every third row lies in a later one.
  [[nodiscard]] std::uint32_t first_guess(std::uint32_t hash) const noexcept {
    std::uint32_t at = hash & mask_;
    while (cells_[at].row_plus_1 != 0 && cells_[at].hash != hash) at = (at + 1) & mask_;
    return cells_[at].row_plus_1 - 1;
  }

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t memory_bytes() const noexcept { return cells_.size_bytes(); }

 private:
  static constexpr std::uint32_t kUsualWalk = 4;  ///< Cells.
  struct Cell {
    std::uint32_t hash;
    std::uint32_t row_plus_1;  ///< 0: empty, so that zero pages are an empty index.
  };

  explicit FlatIndex(ZeroPages<Cell> cells) noexcept
      : cells_(std::move(cells)), mask_(static_cast<std::uint32_t>(cells_.size() - 1)) {}

  ZeroPages<Cell> cells_;
  std::uint32_t mask_;
  std::uint64_t size_ = 0;
};

/// Mixes two words into the hash of a FlatIndex. Good for words with few bits set, too.
[[nodiscard]] inline std::uint32_t mix_hash(std::uint64_t left, std::uint64_t right) noexcept {
  // One 64x64 -> 128 bit multiplication, folded (the "mum" step of wyhash).
  __extension__ using Wide = unsigned __int128;
  const Wide product =
      static_cast<Wide>(left ^ 0xA0761D6478BD642FULL) * (right ^ 0xE7037ED1A0B428DBULL);
  const auto folded =
      static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  return static_cast<std::uint32_t>(folded ^ (folded >> 32));
}

}  // namespace pegaflow::engine
