#pragma once
/// \file
/// The cells of the index, in the order in which they were stored.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "index/key.h"
#include "index/memory/zero_array.h"
#include "index/places.h"

namespace pegaflow::index {

/// A set of holders, by its number; 0 is the empty set.
using SetId = std::uint32_t;

/// The set of a cell, and its credit: how often the hand of the clock has still to pass.
struct CellWord {
  static constexpr std::uint32_t kSetBits = 28;
  static constexpr std::uint32_t kSetMask = (1U << kSetBits) - 1;
  static constexpr std::uint32_t kMostCredit = 3;

  std::uint32_t word = 0;

  [[nodiscard]] SetId set() const { return word & kSetMask; }
  [[nodiscard]] std::uint32_t credit() const { return word >> kSetBits; }
  static CellWord of(SetId set, std::uint32_t credit) { return {set | credit << kSetBits}; }
};

/// Two arrays, of keys and of words, cut into segments. New cells go to the end of the newest
/// segment, so blocks that are stored together lie side by side. Segments wait in a line, the
/// oldest first, to be emptied: their live cells are appended again, or forgotten. Thread-bound.
class Cells {
 public:
  /// For `max_blocks` live cells, with an eighth more room for holes. Errors: kOutOfCapacity.
  static Result<Cells> create(std::size_t max_blocks);

  struct Range {
    Place begin;
    Place end;
  };

  [[nodiscard]] const Key* keys() const { return keys_.data(); }
  [[nodiscard]] const CellWord* words() const { return words_.data(); }
  [[nodiscard]] CellWord& word(Place place) { return words_[place]; }

  /// Whether append() has room, a reserve for moving a segment left aside.
  [[nodiscard]] bool has_room() const { return used_ < segment_cells_ || free_.size() > kReserve; }
  /// Whether so little is free that fragments should be joined, and there is something to gain.
  [[nodiscard]] bool is_fragmented() const;

  /// Adds a cell. Needs has_room(), or the reserve while a segment is moved.
  Place append(Key key, CellWord word);
  /// The cell is a hole from now on.
  void drop(Place place);

  /// Takes the oldest segment that is not being filled out of the line; no live cell may be lost:
  /// then free_segment() or keep_segment().
  std::uint32_t take_oldest();
  void keep_segment(std::uint32_t segment) { push_line(segment); }
  void free_segment(std::uint32_t segment) { free_.push_back(segment); }
  [[nodiscard]] Range range_of(std::uint32_t segment) const;
  [[nodiscard]] std::uint32_t live_in(std::uint32_t segment) const { return live_in_[segment]; }
  /// A segment so full that moving it gains nothing.
  [[nodiscard]] bool is_dense(std::uint32_t segment) const {
    return live_in_[segment] > segment_cells_ - segment_cells_ / 16;
  }

  [[nodiscard]] std::size_t live() const { return live_; }
  [[nodiscard]] std::uint32_t segments() const {
    return static_cast<std::uint32_t>(live_in_.size());
  }
  [[nodiscard]] std::uint32_t segment_cells() const { return segment_cells_; }
  /// The highest place.
  [[nodiscard]] Place last_place() const { return segments() * segment_cells_; }
  [[nodiscard]] std::size_t bytes() const;

 private:
  static constexpr std::size_t kReserve = 2;

  Cells(ZeroArray<Key> keys, ZeroArray<CellWord> words, std::uint32_t segments,
        std::uint32_t segment_cells);
  [[nodiscard]] std::uint32_t segment_of(Place place) const { return (place - 1) / segment_cells_; }
  void push_line(std::uint32_t segment);

  ZeroArray<Key> keys_;  ///< By place: the first is unused.
  ZeroArray<CellWord> words_;
  std::uint32_t segment_cells_;
  std::vector<std::uint32_t> live_in_;  ///< By segment.
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> line_;  ///< Ring: segments that are full, oldest first.
  std::size_t line_first_ = 0;
  std::size_t line_size_ = 0;
  std::uint32_t filling_ = 0;  ///< The newest segment.
  std::uint32_t used_ = 0;     ///< Its cells in use, holes included.
  std::size_t live_ = 0;
};

}  // namespace pegaflow::index
