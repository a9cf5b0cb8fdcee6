#pragma once
/// \file
/// The different sets of holders that blocks have, each kept once.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "index/cells.h"
#include "index/holders.h"
#include "index/memory/bit_row.h"

namespace pegaflow::index {

/// Owns the sets, found by their content, and counts the cells of each: a set without cells is
/// free. A set has two rows: the holders' bits, and by their numbers the engines for which a block
/// of the set is local, which are computed when they are first read after a change.
///
/// A removed bit stays in the rows: callers see it masked, and with() and without() leave it out.
/// Thread-bound. Reading allocates nothing.
class HolderSets {
 public:
  /// `holders` outlives the sets. At most `max_bytes` of memory.
  HolderSets(const Holders& holders, std::size_t max_bytes);

  static constexpr SetId kEmpty = 0;
  /// Returned instead of a set for which there is no memory.
  static constexpr SetId kRefused = CellWord::kSetMask;

  /// The set with `bit`, without its dead bits; or kRefused.
  SetId with(SetId set, std::uint32_t bit);
  /// The set without `bit` and without its dead bits: kEmpty if nothing is left; or kRefused.
  SetId without(SetId set, std::uint32_t bit);
  /// The set without its dead bits: itself if it has none; or kRefused.
  SetId living(SetId set);

  /// One cell more has the set. Sets that with() and others return have to be counted before the
  /// next call that changes a set.
  void add_cell(SetId set) { ++rows_[set].cells; }
  void drop_cell(SetId set) {
    if (--rows_[set].cells == 0) free_set(set);
  }

  /// Keeps the set until drop_cell(), although no cell may have it.
  void pin(SetId set) {
    if (set != kEmpty && set != kRefused) add_cell(set);
  }
  void unpin(SetId set) {
    if (set != kEmpty && set != kRefused) drop_cell(set);
  }

  [[nodiscard]] bool has(SetId set, std::uint32_t bit) const { return has_bit(bits(set), bit); }
  /// Whether a bit of the set is dead.
  [[nodiscard]] bool has_dead(SetId set) const;
  /// Whether a bit of the set is live.
  [[nodiscard]] bool has_live(SetId set) const;
  /// Bits in the set, dead ones included.
  [[nodiscard]] std::uint32_t size(SetId set) const { return rows_[set].size; }
  /// The bits of the set, dead ones included.
  [[nodiscard]] ConstRow bits(SetId set) const { return {&bits_[set * words_], words_}; }
  /// The engines, by their numbers, for which a block of the set is local.
  [[nodiscard]] ConstRow local(SetId set) const {
    if (rows_[set].epoch != holders_.epoch()) refresh_local(set);
    return {&local_[set * words_], words_};
  }

  /// Makes room for all bits and numbers of the holders. To be called when one was added or
  /// renewed.
  void widen();

  [[nodiscard]] std::size_t row_words() const { return words_; }
  [[nodiscard]] std::uint64_t count() const { return count_; }
  [[nodiscard]] std::size_t bytes() const;

 private:
  struct SetRow {
    std::uint64_t hash = 0;
    std::uint32_t cells = 0;
    std::uint32_t size = 0;
    std::uint32_t epoch = 0;  ///< The epoch of its local row.
  };

  /// Copies the live bits of `set` to draft_; returns their hash.
  std::uint64_t draft(SetId set);
  /// The set with the bits in draft_.
  SetId intern(std::uint64_t hash);
  [[nodiscard]] SetId make_set(std::uint64_t hash);
  void free_set(SetId set);
  void refresh_local(SetId set) const;
  [[nodiscard]] std::size_t slot_of(std::uint64_t hash) const { return hash & (slots_.size() - 1); }
  void enlarge_slots();
  [[nodiscard]] std::size_t bytes_of(std::size_t sets) const;

  const Holders& holders_;
  std::size_t max_bytes_;
  std::size_t words_ = 1;             ///< Length of each row.
  mutable std::vector<SetRow> rows_;  ///< By set; mutable with local_, which is computed late.
  std::vector<std::uint64_t> bits_;
  mutable std::vector<std::uint64_t> local_;
  std::vector<SetId> free_;
  std::vector<SetId> slots_;  ///< Hash table with linear probing, at most half full; 0 is empty.
  std::vector<std::uint64_t> draft_;
  std::uint64_t count_ = 0;
};

}  // namespace pegaflow::index
