#include "engine/ssd/index.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"
#include "engine/tables/prefetch.h"

namespace pegaflow::engine::ssd {
namespace {

/// Rows that one part of the cells is meant for; growing to them moves twice as many cells.
constexpr std::uint64_t kRowsOfPart = 8192;
constexpr std::size_t kFirstCells = 8;

constexpr std::uint32_t hash_of(std::uint64_t fingerprint) {
  return static_cast<std::uint32_t>(fingerprint);
}

/// At most three quarters of the cells are used.
constexpr bool is_full(std::size_t used, std::size_t cells) { return (used + 1) * 4 > cells * 3; }

}  // namespace

Result<Index> Index::create(std::uint32_t segments, std::uint32_t rows_per_segment) {
  if (std::uint64_t{segments} * rows_per_segment >= ~std::uint32_t{0}) {
    return fail(Errc::kInvalidArgument,
                "{} segments of {} entries are more than 2^32: use larger segments", segments,
                rows_per_segment);
  }
  return Index(segments, rows_per_segment);
}

Index::Index(std::uint32_t segments, std::uint32_t rows_per_segment)
    : rows_per_segment_(rows_per_segment), segments_(segments) {
  const std::uint64_t rows = std::uint64_t{segments} * rows_per_segment;
  const std::uint64_t parts = std::bit_ceil(std::max<std::uint64_t>(1, rows / kRowsOfPart));
  parts_.resize(parts);
  part_mask_ = static_cast<std::uint32_t>(parts - 1);
}

Index::Part& Index::part(std::uint64_t fingerprint) {
  return parts_[static_cast<std::uint32_t>(fingerprint >> 32) & part_mask_];
}
const Index::Part& Index::part(std::uint64_t fingerprint) const {
  return parts_[static_cast<std::uint32_t>(fingerprint >> 32) & part_mask_];
}

void Index::grow(Part& part) {
  std::vector<Cell> old(part.cells.empty() ? kFirstCells : part.cells.size() * 2);
  old.swap(part.cells);
  for (const Cell& cell : old) {
    if (cell.row_plus_1 != 0) insert(part, cell);
  }
}

void Index::insert(Part& part, Cell cell) {
  const std::size_t mask = part.cells.size() - 1;
  std::size_t at = cell.hash & mask;
  while (part.cells[at].row_plus_1 != 0) at = (at + 1) & mask;
  part.cells[at] = cell;
}

/// Shifts back what would no longer be reached across the hole.
void Index::erase(Part& part, std::uint32_t hole) {
  const auto mask = static_cast<std::uint32_t>(part.cells.size() - 1);
  for (std::uint32_t at = (hole + 1) & mask; part.cells[at].row_plus_1 != 0; at = (at + 1) & mask) {
    if (((at - part.cells[at].hash) & mask) >= ((at - hole) & mask)) {
      part.cells[hole] = part.cells[at];
      hole = at;
    }
  }
  part.cells[hole] = {};
  --part.used;
}

void Index::erase(std::uint64_t fingerprint, std::uint32_t row) {
  Part& from = part(fingerprint);
  const auto mask = static_cast<std::uint32_t>(from.cells.size() - 1);
  std::uint32_t at = hash_of(fingerprint) & mask;
  while (from.cells[at].row_plus_1 != row + 1) {
    PEGA_ASSERT(from.cells[at].row_plus_1 != 0, "row {} of the SSD index has no cell", row);
    at = (at + 1) & mask;
  }
  erase(from, at);
  --size_;
}

Index::Cell* Index::cell_of(std::uint64_t fingerprint, std::uint16_t number) {
  Part& in = part(fingerprint);
  if (in.cells.empty()) return nullptr;
  const std::size_t mask = in.cells.size() - 1;
  for (std::size_t i = hash_of(fingerprint) & mask; in.cells[i].row_plus_1 != 0;
       i = (i + 1) & mask) {
    if (in.cells[i].hash != hash_of(fingerprint)) continue;
    const Row& row = at(in.cells[i].row_plus_1 - 1);
    if (row.fingerprint == fingerprint && row.number == number) return &in.cells[i];
  }
  return nullptr;
}

void Index::begin(std::uint32_t segment, std::uint64_t life) {
  Segment& begun = segments_[segment];
  for (std::uint32_t i = 0; i < begun.rows.size(); ++i) remove({segment, i});
  begun.rows = {};
  begun.life = life;
}

void Index::expect(std::uint32_t segment, std::size_t rows) {
  std::vector<Row>& of = segments_[segment].rows;
  of.reserve(std::min<std::size_t>(of.size() + rows, rows_per_segment_));
}

void Index::prefetch(std::uint64_t fingerprint) const {
  const Part& in = part(fingerprint);
  if (in.cells.empty()) return;
  prefetch_to_write(&in.cells[hash_of(fingerprint) & (in.cells.size() - 1)]);
}

Index::Place Index::add(std::uint32_t segment, Row row) {
  Segment& to = segments_[segment];
  const Place place{segment, static_cast<std::uint32_t>(to.rows.size())};
  PEGA_ASSERT(to.life != 0 && to.rows.size() < rows_per_segment_ && row.proof != 0,
              "segment {} takes no row", segment);
  if (Cell* const other = cell_of(row.fingerprint, row.number); other != nullptr) {
    const Place there = local(other->row_plus_1 - 1);
    if (segments_[there.segment].life > to.life) {
      row.proof = 0;
      to.rows.push_back(row);
      return place;
    }
    segments_[there.segment].rows[there.row].proof = 0;
    other->row_plus_1 = global(place) + 1;
    to.rows.push_back(row);
    return place;
  }
  to.rows.push_back(row);
  Part& in = part(row.fingerprint);
  if (is_full(in.used, in.cells.size())) grow(in);
  insert(in, {hash_of(row.fingerprint), global(place) + 1});
  ++in.used;
  ++size_;
  return place;
}

std::optional<Index::Found> Index::find(std::uint16_t number, const BlockKey& key) const {
  const std::uint64_t fingerprint = fingerprint_of(number, key);
  // Changes nothing; the cell is only looked at.
  const Cell* const cell = const_cast<Index*>(this)->cell_of(fingerprint, number);
  if (cell == nullptr) return std::nullopt;
  const Place place = local(cell->row_plus_1 - 1);
  const Segment& segment = segments_[place.segment];
  return Found{.at = place, .row = segment.rows[place.row], .life = segment.life};
}

void Index::remove(Place at) {
  Segment& segment = segments_[at.segment];
  if (at.row >= segment.rows.size() || segment.rows[at.row].proof == 0) return;
  erase(segment.rows[at.row].fingerprint, global(at));
  segment.rows[at.row].proof = 0;
}

void Index::note_hit(Place at) {
  Segment& segment = segments_[at.segment];
  if (at.row >= segment.rows.size()) return;
  std::uint16_t& flags = segment.rows[at.row].flags;
  if ((flags & Entry::kHits) != Entry::kHits) ++flags;
}

const Index::Row* Index::row(Place at) const {
  const Segment& segment = segments_[at.segment];
  if (at.row >= segment.rows.size() || segment.rows[at.row].proof == 0) return nullptr;
  return &segment.rows[at.row];
}

std::uint64_t Index::memory_bytes() const {
  std::uint64_t bytes = parts_.capacity() * sizeof(Part) + segments_.capacity() * sizeof(Segment);
  for (const Part& each : parts_) bytes += each.cells.capacity() * sizeof(Cell);
  for (const Segment& each : segments_) bytes += each.rows.capacity() * sizeof(Row);
  return bytes;
}

Result<void> Index::check() const {
  std::uint64_t live = 0;
  for (std::uint32_t segment = 0; segment < segments_.size(); ++segment) {
    const Segment& each = segments_[segment];
    if (each.life == 0 && !each.rows.empty()) {
      return fail(Errc::kInternal, "segment {} has rows and no life", segment);
    }
    for (std::uint32_t i = 0; i < each.rows.size(); ++i) {
      if (each.rows[i].proof == 0) continue;
      ++live;
      const Row& row = each.rows[i];
      const Cell* const cell = const_cast<Index*>(this)->cell_of(row.fingerprint, row.number);
      if (cell == nullptr || cell->row_plus_1 != global({segment, i}) + 1) {
        return fail(Errc::kInternal, "row {} of segment {} is not found", i, segment);
      }
    }
  }
  std::uint64_t used = 0;
  for (const Part& each : parts_) used += each.used;
  if (live != size_ || used != size_) {
    return fail(Errc::kInternal, "{} rows, {} cells, {} counted", live, used, size_);
  }
  return {};
}

}  // namespace pegaflow::engine::ssd
