#pragma once
/// \file
/// The tables of the index, and the changes of one cell that keep them consistent.

#include <cstddef>
#include <cstdint>

#include "index/cells.h"
#include "index/holder_sets.h"
#include "index/holders.h"
#include "index/places.h"

namespace pegaflow::index {

/// Cells, the table that finds them, and the sets that they have: each live cell is in the table,
/// and counted in its set and for each of its live holders. Thread-bound.
struct Tables {
  Tables(std::uint32_t max_holders, std::size_t set_bytes, Cells cell_table, Places place_table)
      : holders(max_holders),
        sets(holders, set_bytes),
        cells(std::move(cell_table)),
        places(std::move(place_table)) {}
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;

  [[nodiscard]] Place find(Key key) const { return places.find(key, cells.keys()); }

  /// Adds a cell that is not in the table. Needs room.
  void add(Key key, SetId set, std::uint32_t credit) {
    places.insert(key, cells.append(key, CellWord::of(set, credit)));
    sets.add_cell(set);
  }

  /// The cell has another set from now on; one that is kEmpty or kRefused forgets it. The caller
  /// counts the blocks of holders.
  void change_set(Place place, SetId set) {
    const CellWord former = cells.word(place);
    if (set == former.set()) return;
    if (set == HolderSets::kEmpty || set == HolderSets::kRefused) {
      places.erase(cells.keys()[place], place);
      cells.drop(place);
    } else {
      sets.add_cell(set);
      cells.word(place) = CellWord::of(set, former.credit());
    }
    sets.drop_cell(former.set());
  }

  /// Forgets the cell for all its holders.
  void forget(Place place) {
    uncount_holders(cells.word(place).set());
    change_set(place, HolderSets::kEmpty);
  }

  /// One block less for each live holder of the set.
  void uncount_holders(SetId set) {
    const ConstRow row = sets.bits(set);
    const ConstRow live = holders.live_bits();
    for (std::size_t i = 0; i < row.size(); ++i) {
      each_bit(row[i] & live[i], static_cast<std::uint32_t>(i * 64),
               [this](std::uint32_t bit) { --holders.blocks(holders.holder_of(bit)); });
    }
  }

  /// Moves the cell to the end of the newest segment. Its former place is a hole.
  void move_to_end(Place from) {
    const Key key = cells.keys()[from];
    const Place to = cells.append(key, cells.word(from));
    places.move(key, from, to);
    cells.drop(from);
  }

  Holders holders;
  HolderSets sets;
  Cells cells;
  Places places;
};

}  // namespace pegaflow::index
