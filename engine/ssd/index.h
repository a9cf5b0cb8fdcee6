#pragma once
/// \file
/// Which blocks are on a disk, and where: at most 48 bytes a block, whatever its number of shards.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "engine/ssd/format.h"

namespace pegaflow::engine::ssd {

/// Owns a row for each block of a disk, and finds it by its name. It has no keys: a row of another
/// key with an equal fingerprint (one in 2^64) is found, read, and fails its proof.
///
/// Rows lie segment by segment, so a segment that is used again takes its rows with it in one walk.
/// The cells that find them are in parts that grow one by one, so that no call rehashes more than
/// 16,384 of them. Of two rows of one name, that of the segment with the greater life counts, in
/// whatever order they are added.
///
/// Thread-bound. 24 bytes a row and 11 to 21 bytes of cells.
class Index {
 public:
  struct Row {
    std::uint64_t fingerprint = 0;
    std::uint64_t proof = 0;  ///< 0: the row was removed.
    std::uint32_t place = 0;  ///< As in Entry.
    std::uint16_t number = 0;
    std::uint16_t flags = 0;
  };
  static_assert(sizeof(Row) == 24);

  /// A row; void once its segment is cleared.
  struct Place {
    std::uint32_t segment = 0;
    std::uint32_t row = 0;
  };
  struct Found {
    Place at;
    Row row;
    std::uint64_t life = 0;  ///< The life of its segment.
  };

  /// Errors: kInvalidArgument when there may be 2^32 rows or more.
  static Result<Index> create(std::uint32_t segments, std::uint32_t rows_per_segment);

  /// Begins a life of the segment: drops its rows.
  void begin(std::uint32_t segment, std::uint64_t life);
  /// 0: the segment has no blocks.
  [[nodiscard]] std::uint64_t life(std::uint32_t segment) const { return segments_[segment].life; }

  /// The segment that has begun gets so many rows soon.
  void expect(std::uint32_t segment, std::size_t rows);
  /// Prefetches what add() of a row with this fingerprint will touch.
  void prefetch(std::uint64_t fingerprint) const;
  /// Adds a row to a segment that has begun and is not full. A row of the same name in a segment of
  /// a smaller life is removed; if there is one of a greater life, this one is not found.
  Place add(std::uint32_t segment, Row row);
  [[nodiscard]] std::optional<Found> find(std::uint16_t number, const BlockKey& key) const;
  /// Removes a row. Removed ones are fine.
  void remove(Place at);
  /// The block was read. Counts up to Entry::kHits.
  void note_hit(Place at);
  /// Null once it was removed, or its segment has another life.
  [[nodiscard]] const Row* row(Place at) const;
  /// Rows of the segment, removed ones included.
  [[nodiscard]] std::uint32_t rows_of(std::uint32_t segment) const {
    return static_cast<std::uint32_t>(segments_[segment].rows.size());
  }
  /// The segment will get no more rows: returns memory that it does not need.
  void close(std::uint32_t segment) { segments_[segment].rows.shrink_to_fit(); }

  /// Rows that were not removed.
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] std::uint64_t memory_bytes() const;
  /// Errors: kInternal that names the first broken invariant.
  [[nodiscard]] Result<void> check() const;

 private:
  struct Cell {
    std::uint32_t hash = 0;
    std::uint32_t row_plus_1 = 0;  ///< 0: empty.
  };
  struct Part {
    std::vector<Cell> cells;
    std::uint32_t used = 0;
  };
  struct Segment {
    std::uint64_t life = 0;
    std::vector<Row> rows;
  };

  Index(std::uint32_t segments, std::uint32_t rows_per_segment);
  [[nodiscard]] Part& part(std::uint64_t fingerprint);
  [[nodiscard]] const Part& part(std::uint64_t fingerprint) const;
  [[nodiscard]] std::uint32_t global(Place at) const {
    return at.segment * rows_per_segment_ + at.row;
  }
  [[nodiscard]] Place local(std::uint32_t row) const {
    return {row / rows_per_segment_, row % rows_per_segment_};
  }
  [[nodiscard]] const Row& at(std::uint32_t row) const {
    return segments_[row / rows_per_segment_].rows[row % rows_per_segment_];
  }
  [[nodiscard]] Cell* cell_of(std::uint64_t fingerprint, std::uint16_t number);
  static void insert(Part& part, Cell cell);
  static void grow(Part& part);
  static void erase(Part& part, std::uint32_t hole);
  void erase(std::uint64_t fingerprint, std::uint32_t row);

  std::uint32_t rows_per_segment_;
  std::uint32_t part_mask_;
  std::vector<Part> parts_;
  std::vector<Segment> segments_;
  std::uint64_t size_ = 0;
};

}  // namespace pegaflow::engine::ssd
