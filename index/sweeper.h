#pragma once
/// \file
/// The work on cells that no call names: dead bits are taken out, fragments joined, and blocks
/// forgotten when the index is full.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "index/tables.h"

namespace pegaflow::index {

/// Thread-bound.
class Sweeper {
 public:
  /// `tables` outlives it.
  Sweeper(Tables& tables, std::size_t max_blocks) : tables_(tables), max_blocks_(max_blocks) {}

  /// The bit is dead: no set is to have it any longer.
  void add_dead(std::uint32_t bit);

  /// Makes room for one cell more: forgets the blocks of the oldest segments while there are
  /// `max_blocks`, and joins segments while none is free.
  void make_room() {
    if (tables_.cells.live() < max_blocks_ && tables_.cells.has_room()) return;
    make_room_now();
  }

  /// Visits up to `max_cells` cells. Returns whether more is to do.
  bool sweep(std::size_t max_cells);

  /// Takes all dead bits out of all sets, however long it takes.
  void finish();

  [[nodiscard]] std::uint64_t evicted() const { return evicted_; }
  [[nodiscard]] std::uint64_t moved() const { return moved_; }
  [[nodiscard]] std::uint64_t swept() const { return swept_; }
  [[nodiscard]] std::uint64_t refused() const { return refused_; }

 private:
  void make_room_now();
  /// Lets the hand of the clock pass over the oldest segment: blocks whose claim to stay is not
  /// above `pressure` are forgotten.
  void pass_oldest(std::uint32_t pressure);
  /// Moves the live cells of the oldest segment to the newest. A dense one stays.
  void join_oldest();
  /// Takes the dead bits out of the cell's set. Returns whether the cell is still there.
  bool revive(Place place);
  void visit_next(std::size_t count);
  void end_pass();

  Tables& tables_;
  std::size_t max_blocks_;
  Place next_ = 1;                      ///< The pass over all cells has come so far.
  std::vector<std::uint32_t> dying_;    ///< Bits that are free at the end of this pass.
  std::vector<std::uint32_t> waiting_;  ///< Bits that died in the middle of it.
  std::uint64_t evicted_ = 0;
  std::uint64_t moved_ = 0;
  std::uint64_t swept_ = 0;
  std::uint64_t refused_ = 0;
};

}  // namespace pegaflow::index
