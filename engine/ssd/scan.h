#pragma once
/// \file
/// Finds the blocks of a disk again, from its segments' headers and tables.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/ssd/format.h"
#include "engine/ssd/index.h"
#include "engine/ssd/names.h"
#include "engine/ssd/segment_log.h"

namespace pegaflow::engine::ssd {

/// Decides what is read next, and adds what was read to the index. A segment's header and first
/// pages are read at once (kFirstBytes, enough for blocks of 1 MiB in segments of 128 MiB), the
/// rest only where the last of these pages is full. After a segment whose table was longer, the
/// whole table of the next one is read at once. The order does not matter, because the index
/// prefers greater lives; blocks are found while the scan goes on.
///
/// A page that is damaged, or of another life, ends its segment there. Entries whose number has no
/// record are dead, and entries beyond the segment are ignored. Data is not read: damaged data
/// fails its proof. Thread-bound.
class Scan {
 public:
  static constexpr std::uint64_t kFirstBytes = 4 * kSector;

  /// All of them outlive it.
  Scan(const Superblock& superblock, const NameTable& names, Index& index, SegmentLog& log);

  struct Read {
    std::uint32_t segment = 0;
    std::uint32_t first_page = 0;  ///< 0: the header is the first page of the bytes.
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  /// The next read; no value while all that is known to be needed has been returned.
  std::optional<Read> next();
  /// A read that next() has returned could not be started: it is returned again.
  void put_back(const Read& read) { more_.push_back(read); }
  /// Its bytes. Each read ends with one take() or failed().
  void take(const Read& read, std::span<const std::byte> bytes);
  /// The read failed: the segment's further blocks are lost. Of a long table that was read at once,
  /// the first pages are read again.
  void failed(const Read& read);

  /// Segments of smaller lives were dropped meanwhile, and are not found.
  void drop_before(std::uint64_t life) noexcept { superblock_.first_life = life; }
  [[nodiscard]] bool is_done() const noexcept { return done_ == superblock_.segments; }
  [[nodiscard]] std::uint32_t segments_done() const noexcept { return done_; }
  /// The greatest life that was found.
  [[nodiscard]] std::uint64_t greatest_life() const noexcept { return greatest_life_; }
  struct Counts {
    std::uint64_t blocks = 0;
    std::uint64_t dead = 0;           ///< Entries of former epochs, or of forgotten namespaces.
    std::uint64_t damaged_pages = 0;  ///< In tables whose header is valid.
    std::uint64_t failed_reads = 0;
  };
  [[nodiscard]] const Counts& counts() const noexcept { return counts_; }

 private:
  void take_pages(const Read& read, std::span<const std::byte> pages);
  void add(std::uint32_t segment, std::span<const Entry> entries);
  void end(std::uint32_t segment);

  Superblock superblock_;
  Index& index_;
  SegmentLog& log_;
  std::vector<bool> alive_;  ///< By number.
  std::uint32_t next_segment_ = 0;
  std::vector<Read> more_;        ///< The rest of segments with a long table, and put_back().
  bool has_long_tables_ = false;  ///< The last table that ended was longer than the first pages.
  std::uint32_t done_ = 0;
  std::uint64_t greatest_life_ = 0;
  Counts counts_;
};

}  // namespace pegaflow::engine::ssd
