#include "tests/sim/page_memory.h"

#include <algorithm>

#include <fmt/format.h>

#include "tests/sim/oracle_store.h"

namespace pegaflow::sim {

namespace {

std::uint64_t number(Stamp stamp) { return static_cast<std::uint64_t>(stamp); }

}  // namespace

std::span<PageMemory::Cell> PageMemory::at(Place place) {
  if (place.count == 0 || place.first + place.count > cells_.size()) {
    throw Mismatch{fmt::format("a page lies in cells {} to {} of {}", place.first,
                               place.first + place.count, cells_.size())};
  }
  return std::span(cells_).subspan(place.first, place.count);
}

void PageMemory::begin_write(Place place, Stamp stamp) {
  for (Cell& cell : at(place)) {
    if (cell.writer != Stamp{}) {
      throw Mismatch{fmt::format("cell {} was lent to copy {} while copy {} may still write it",
                                 place.first, number(stamp), number(cell.writer))};
    }
    if (cell.readers != 0) {
      throw Mismatch{fmt::format("cell {} was lent to copy {} while {} readers may still read it",
                                 place.first, number(stamp), cell.readers)};
    }
    cell = {.bytes = stamp, .writer = stamp};
  }
}

void PageMemory::write(Place place, Stamp stamp) {
  for (Cell& cell : at(place)) {
    if (cell.writer != stamp || cell.readers != 0) {
      throw Mismatch{fmt::format("copy {} writes into cell {}, which copy {} owns and {} read",
                                 number(stamp), place.first, number(cell.writer), cell.readers)};
    }
    cell.bytes = stamp;
    cell.whole = false;
  }
}

void PageMemory::end_write(Place place, Stamp stamp, bool whole) {
  write(place, stamp);
  for (Cell& cell : at(place)) {
    cell.whole = whole;
    cell.writer = Stamp{};
  }
}

void PageMemory::begin_read(Place place) {
  for (Cell& cell : at(place)) ++cell.readers;
}

void PageMemory::end_read(Place place) {
  for (Cell& cell : at(place)) --cell.readers;
}

void PageMemory::verify(Place place, Stamp expected) const {
  for (std::uint32_t i = place.first; i < place.first + place.count; ++i) {
    const Cell& cell = cells_.at(i);
    if (cell.bytes == expected && cell.whole && cell.writer == Stamp{}) continue;
    throw Mismatch{fmt::format("a reader of cell {} expects bytes {} and sees {}, {}", i,
                               number(expected), number(cell.bytes),
                               cell.whole ? "whole" : "torn")};
  }
}

bool PageMemory::is_quiet() const {
  return std::all_of(cells_.begin(), cells_.end(),
                     [](const Cell& cell) { return cell.writer == Stamp{} && cell.readers == 0; });
}

}  // namespace pegaflow::sim
