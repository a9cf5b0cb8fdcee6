#pragma once
/// \file
/// The records of a disk: superblock, names of namespaces, segment header, table page.
///
///     0        superblock A, B (4 KiB each)
///     64 KiB   names A; 128 KiB names B (20 KiB each)
///     1 MiB    segment 0, 1, 2, ...
///     segment  header (4 KiB) | table pages (4 KiB each) | blocks
///
/// All numbers are little-endian. Each record carries a checksum (XXH3-128) and the id of its disk.
/// Decoders accept any bytes.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "base/id128.h"
#include "engine/ssd/proof.h"

namespace pegaflow::engine::ssd {

/// The unit of all offsets and lengths.
inline constexpr std::uint64_t kSector = 4096;
inline constexpr std::array<std::uint64_t, 2> kSuperblockOffsets = {0, kSector};
inline constexpr std::array<std::uint64_t, 2> kNamesOffsets = {64 << 10, 128 << 10};
inline constexpr std::uint64_t kNamesBytes = 5 * kSector;
inline constexpr std::uint64_t kLogOffset = 1 << 20;
inline constexpr std::uint64_t kLeastSegment = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kMostSegment = std::uint64_t{1} << 30;
/// The table of a segment has room for blocks of this size; with smaller ones a segment ends before
/// its data area is full.
inline constexpr std::uint64_t kUsualLeastBlock = 64 << 10;

// ---- the superblock

/// The division of a disk, and which of its content counts.
struct Superblock {
  Id128 disk{};
  std::uint64_t sequence = 0;  ///< The copy with the higher number counts.
  std::uint64_t segment_bytes = 0;
  std::uint32_t table_pages = 0;  ///< In each segment.
  std::uint32_t segments = 0;
  std::uint64_t opened = 0;      ///< How often the disk was opened: the upper half of lives.
  std::uint64_t first_life = 1;  ///< Segments of earlier lives were dropped.

  [[nodiscard]] std::uint64_t segment_offset(std::uint32_t segment) const {
    return kLogOffset + segment * segment_bytes;
  }
  [[nodiscard]] std::uint64_t end() const { return segment_offset(segments); }
  /// The bytes of a segment in front of its blocks.
  [[nodiscard]] std::uint64_t head_bytes() const { return (1 + table_pages) * kSector; }
  [[nodiscard]] std::uint32_t most_entries() const;
  bool operator==(const Superblock&) const = default;
};

/// Divides a disk of `size_bytes` into segments. Errors: kInvalidArgument for a segment size that
/// is not a multiple of 4 KiB or out of range, or a disk without room for two segments.
Result<Superblock> divide(const Id128& disk, std::uint64_t size_bytes, std::uint64_t segment_bytes);

void encode(const Superblock& superblock, std::span<std::byte, kSector> page);
/// Why a page is no superblock. Errors: kRefused for a page of another program, or another format;
/// kCorrupt for a damaged one, or one with impossible values; kGone for a page of zeros.
Result<Superblock> decode_superblock(std::span<const std::byte, kSector> page);
/// The valid copy with the higher sequence. Errors: of the first copy, when neither is valid.
Result<Superblock> newer(const Result<Superblock>& a, const Result<Superblock>& b);

// ---- the names

/// A kind of a namespace in one epoch, by the number that entries use for it.
struct NameRecord {
  Origin origin{};
  std::uint16_t number = 0;   ///< Never 0, and never used again for another origin.
  std::uint32_t used_at = 0;  ///< Seconds since 1970; the one unused for longest gives way.
  bool operator==(const NameRecord&) const = default;
};
inline constexpr std::size_t kMostNames = 256;

struct Names {
  std::uint64_t sequence = 0;
  std::uint16_t next_number = 1;
  std::vector<NameRecord> records{};  ///< At most kMostNames; no name and no number twice.
};

void encode(const Names& names, const Id128& disk, std::span<std::byte, kNamesBytes> area);
/// No value for damaged bytes, those of another disk, and an area that was never written.
std::optional<Names> decode_names(std::span<const std::byte, kNamesBytes> area, const Id128& disk);

// ---- segments

/// A block in a segment.
struct Entry {
  BlockKey key{};
  std::uint64_t proof = 0;
  std::uint32_t place = 0;   ///< Offset on the disk, in units of 4 KiB.
  std::uint32_t units = 0;   ///< Length in units of 4 KiB.
  std::uint16_t number = 0;  ///< NameRecord::number.
  std::uint16_t kind = 0;    ///< Origin::kind.
  std::uint16_t depth = 0;   ///< Blocks before it in its prompt; kUnknownDepth: unknown.
  std::uint16_t flags = 0;
  std::uint32_t saved_at = 0;  ///< Seconds since 1970.

  static constexpr std::uint16_t kUnknownDepth = 0xFFFF;
  /// How often it was read, up to 3.
  static constexpr std::uint16_t kHits = 3;
  /// The page checksums equal the writer's, and may be compared with a loaded page.
  static constexpr std::uint16_t kHasChecksums = 4;
  bool operator==(const Entry&) const = default;
};
inline constexpr std::uint32_t kEntriesPerPage = 63;

struct SegmentHeader {
  std::uint32_t segment = 0;
  std::uint64_t life = 0;
};
void encode(const SegmentHeader& header, const Id128& disk, std::span<std::byte, kSector> page);
std::optional<SegmentHeader> decode_segment_header(std::span<const std::byte, kSector> page,
                                                   const Id128& disk);

struct TablePage {
  std::uint64_t life = 0;
  std::uint32_t page = 0;  ///< Its index in the table.
  std::vector<Entry> entries{};
};
/// `page.entries` are at most kEntriesPerPage.
void encode(const TablePage& page, const Id128& disk, std::span<std::byte, kSector> to);
/// No value for damaged bytes and those of another disk.
std::optional<TablePage> decode_table_page(std::span<const std::byte, kSector> page,
                                           const Id128& disk);
/// Whether the entry's block lies in the data area of that segment.
[[nodiscard]] bool lies_in(const Entry& entry, const Superblock& superblock, std::uint32_t segment);

}  // namespace pegaflow::engine::ssd
