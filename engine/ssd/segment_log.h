#pragma once
/// \file
/// The log of segments of one disk: where the next block goes, and which segment is used again.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "engine/ssd/format.h"

namespace pegaflow::engine::ssd {

/// Appends blocks to one open segment. When it is full the next begins: a free one, or the one with
/// the smallest life, whose blocks are lost. A segment is not used again while its header, one of
/// its table pages or one of its blocks is being written, or a block is being read: a header that
/// is written late would replace that of the next life.
///
/// The caller does the I/O: it writes the header of a segment that open() began, the blocks
/// at the places that take() returned, and the pages that next_table() returns, which only name
/// blocks whose write was reported by wrote(). Thread-bound.
class SegmentLog {
 public:
  explicit SegmentLog(const Superblock& superblock);

  /// A segment that has blocks of that life, as recovery found it.
  void found(std::uint32_t segment, std::uint64_t life);
  /// Every closed segment becomes free.
  void drop_all();
  /// The oldest closed segment that is not read becomes free, because something other than the
  /// disk is short: from now on those that hold blocks count as all there are. No value: none.
  std::optional<std::uint32_t> drop_oldest();

  // ---- writing

  struct Room {
    std::uint32_t segment = 0;
    std::uint64_t offset = 0;  ///< On the disk.
    std::uint64_t life = 0;
  };
  /// The longest block that a segment takes: a quarter of it.
  [[nodiscard]] std::uint64_t most_bytes() const { return superblock_.segment_bytes / 4; }
  /// Takes room for a block of that many bytes, a multiple of 4 KiB, and counts its write as in
  /// flight until wrote() or lost(). No value when the open segment has no room, or none is open.
  std::optional<Room> take(std::uint64_t bytes);
  /// The block of that room is on the disk: the next table page names it.
  void wrote(const Room& room, const Entry& entry);
  /// It is not, and the room stays empty.
  void lost(const Room& room);

  /// The open segment gets no further block.
  void close();
  [[nodiscard]] bool has_open() const noexcept { return open_ != kNone; }
  /// The segment that open() would use; no value while all are being read or written.
  [[nodiscard]] std::optional<std::uint32_t> next() const;
  /// Opens next(). `life` is greater than any before. The write of its header counts as in flight
  /// until header_written().
  void open(std::uint32_t segment, std::uint64_t life);
  /// The write of the header has ended, or did not begin. Returns whether the segment is complete
  /// now, as table_written().
  bool header_written(std::uint32_t segment);

  /// Whether the segment of this life is used again soon: at most two fifths of all segments are
  /// filled before. A block that is of use should be written again then: on a trace of
  /// conversations this finds 6 % more blocks for 7 % more writes (decision 0024).
  [[nodiscard]] bool is_leaving(std::uint64_t life) const {
    if (!leaving_) leaving_ = greatest_leaving();
    return life <= *leaving_;
  }

  // ---- tables

  struct Table {
    std::uint32_t segment = 0;
    std::uint64_t offset = 0;  ///< On the disk.
    TablePage page;
  };
  /// The next page to be written: a full one or the last of a segment that was closed; with `all`
  /// also one with room for more. Its write is in flight until table_written(). Pages of a segment
  /// are written one at a time.
  std::optional<Table> next_table(bool all);
  /// The write of the page has ended. One that failed is not repeated: its blocks are found until a
  /// restart. Returns whether the segment is complete now: nothing of it is in flight, and a flush
  /// makes it durable.
  bool table_written(std::uint32_t segment);
  /// Entries that no table page names yet.
  [[nodiscard]] std::size_t unsaved() const;
  /// Headers, blocks and table pages whose writes are in flight.
  [[nodiscard]] std::size_t in_flight() const;

  // ---- reading

  void begin_read(std::uint32_t segment) { ++reads_[segment]; }
  void end_read(std::uint32_t segment) { --reads_[segment]; }
  [[nodiscard]] bool is_read(std::uint32_t segment) const { return reads_[segment] != 0; }

  [[nodiscard]] std::uint32_t free_segments() const noexcept {
    return static_cast<std::uint32_t>(free_.size());
  }
  [[nodiscard]] std::uint32_t closed_segments() const noexcept {
    return static_cast<std::uint32_t>(closed_.size());
  }

 private:
  /// A segment whose header, blocks or pages are not all written.
  struct Writing {
    std::uint32_t segment = 0;
    std::uint64_t life = 0;
    std::uint64_t used = 0;       ///< Bytes of it, the head included.
    std::uint32_t in_flight = 0;  ///< Blocks.
    std::uint32_t taken = 0;      ///< Blocks, all that take() returned.
    std::vector<Entry> entries{};
    std::size_t saved = 0;   ///< Entries that pages on the disk name.
    std::size_t saving = 0;  ///< Entries that they and the page in flight name; 0: none is.
    bool is_open = true;
    bool has_header = false;  ///< Its write has ended.
  };
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  Writing* writing(std::uint32_t segment);
  bool settle(std::uint32_t segment);
  [[nodiscard]] std::uint64_t greatest_leaving() const;

  Superblock superblock_;
  std::set<std::uint32_t> free_;
  std::set<std::pair<std::uint64_t, std::uint32_t>> closed_;  ///< By life.
  /// The greatest life that is leaving; no value: to be computed again.
  mutable std::optional<std::uint64_t> leaving_;
  std::vector<Writing> writing_;  ///< The open one last.
  std::uint32_t open_ = kNone;
  bool is_short_ = false;  ///< Not all segments can be used.
  std::vector<std::uint32_t> reads_;
};

}  // namespace pegaflow::engine::ssd
