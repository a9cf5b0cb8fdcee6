#include "engine/ssd/format.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>
#include <type_traits>

#include "base/assert.h"
#include "engine/types/hash.h"

namespace pegaflow::engine::ssd {
namespace {

static_assert(std::endian::native == std::endian::little);

using Magic = std::array<char, 8>;
constexpr Magic kSuperblockMagic = {'P', 'E', 'G', 'A', 'S', 'S', 'D', '1'};
constexpr Magic kNamesMagic = {'P', 'E', 'G', 'A', 'N', 'A', 'M', 'E'};
constexpr Magic kSegmentMagic = {'P', 'E', 'G', 'A', 'S', 'E', 'G', 'M'};
constexpr Magic kTableMagic = {'P', 'E', 'G', 'A', 'T', 'A', 'B', 'L'};
constexpr std::uint32_t kFormat = 1;

/// Stands at the beginning of each record; the checksum covers all of the record behind it.
struct Head {
  Magic magic;
  Checksum checksum;
  Id128 disk;
};
static_assert(sizeof(Head) == 40);

struct RawSuperblock {
  Head head;
  std::uint32_t format;
  std::uint32_t table_pages;
  std::uint64_t sequence;
  std::uint64_t segment_bytes;
  std::uint64_t opened;
  std::uint64_t first_life;
  std::uint32_t segments;
  std::uint32_t spare;
};
struct RawNames {
  Head head;
  std::uint64_t sequence;
  std::uint32_t count;
  std::uint16_t next_number;
  std::array<std::uint16_t, 5> spare;
};
static_assert(sizeof(RawNames) == 64);
struct RawName {
  SpaceName name;
  std::uint64_t counter;
  std::uint64_t id;
  std::uint16_t number;
  std::uint16_t kind;
  std::uint32_t used_at;
  std::uint64_t spare;
};
static_assert(sizeof(RawName) == 64);
static_assert(sizeof(RawNames) + kMostNames * sizeof(RawName) <= kNamesBytes);
struct RawSegment {
  Head head;
  std::uint64_t life;
  std::uint32_t segment;
  std::uint32_t spare;
};
struct RawTable {
  Head head;
  std::uint64_t life;
  std::uint32_t page;
  std::uint32_t count;
  std::uint64_t spare;
};
static_assert(sizeof(RawTable) == 64);
struct RawEntry {
  BlockKey key;
  std::uint64_t proof;
  std::uint32_t place;
  std::uint32_t units;
  std::uint16_t number;
  std::uint16_t kind;
  std::uint16_t depth;
  std::uint16_t flags;
  std::uint32_t saved_at;
  std::uint32_t spare;
};
static_assert(sizeof(RawEntry) == 64);
static_assert(sizeof(RawTable) + kEntriesPerPage * sizeof(RawEntry) == kSector);

template <typename Raw>
Raw raw_at(std::span<const std::byte> bytes, std::size_t offset = 0) {
  static_assert(std::is_trivially_copyable_v<Raw>);
  Raw raw;
  std::memcpy(&raw, bytes.data() + offset, sizeof raw);
  return raw;
}

template <typename Raw>
void put(std::span<std::byte> bytes, const Raw& raw, std::size_t offset = 0) {
  std::memcpy(bytes.data() + offset, &raw, sizeof raw);
}

/// The checksum of everything behind its own place.
Checksum checksum_of(std::span<const std::byte> record) {
  return hash128(record.subspan(offsetof(Head, disk)));
}

void finish(std::span<std::byte> record) {
  const Checksum checksum = checksum_of(record);
  std::memcpy(record.data() + offsetof(Head, checksum), &checksum, sizeof checksum);
}

bool is_valid(std::span<const std::byte> record, const Magic& magic, const Id128& disk) {
  const Head head = raw_at<Head>(record);
  return head.magic == magic && head.disk == disk && head.checksum == checksum_of(record);
}

void clear(std::span<std::byte> bytes) { std::fill(bytes.begin(), bytes.end(), std::byte{0}); }

bool is_possible(const RawSuperblock& raw) {
  return raw.segment_bytes >= kLeastSegment && raw.segment_bytes <= kMostSegment &&
         raw.segment_bytes % kSector == 0 && raw.table_pages > 0 &&
         raw.table_pages < raw.segment_bytes / kSector / 2 && raw.segments >= 2 &&
         // Places are numbers of 4 KiB in 32 bits.
         (kLogOffset + raw.segments * raw.segment_bytes) / kSector <= (std::uint64_t{1} << 32) &&
         raw.opened < (std::uint64_t{1} << 31);
}

}  // namespace

std::uint32_t Superblock::most_entries() const { return table_pages * kEntriesPerPage; }

Result<Superblock> divide(const Id128& disk, std::uint64_t size_bytes,
                          std::uint64_t segment_bytes) {
  if (segment_bytes < kLeastSegment || segment_bytes > kMostSegment ||
      segment_bytes % kSector != 0) {
    return fail(Errc::kInvalidArgument,
                "a segment has 1 MiB to 1 GiB, in units of 4 KiB, and not {} bytes", segment_bytes);
  }
  const std::uint64_t log = size_bytes - std::min(size_bytes, kLogOffset);
  const std::uint64_t most = ((std::uint64_t{1} << 32) * kSector - kLogOffset) / segment_bytes;
  const std::uint64_t segments = std::min(log / segment_bytes, most);
  if (segments < 2) {
    return fail(Errc::kInvalidArgument, "{} bytes have no room for two segments of {} bytes",
                size_bytes, segment_bytes);
  }
  const std::uint64_t entries = std::max<std::uint64_t>(segment_bytes / kUsualLeastBlock, 1);
  return Superblock{
      .disk = disk,
      .sequence = 1,
      .segment_bytes = segment_bytes,
      .table_pages = static_cast<std::uint32_t>((entries + kEntriesPerPage - 1) / kEntriesPerPage),
      .segments = static_cast<std::uint32_t>(segments),
      .opened = 0,
      .first_life = 1};
}

void encode(const Superblock& superblock, std::span<std::byte, kSector> page) {
  clear(page);
  put(page,
      RawSuperblock{.head = {.magic = kSuperblockMagic, .checksum = {}, .disk = superblock.disk},
                    .format = kFormat,
                    .table_pages = superblock.table_pages,
                    .sequence = superblock.sequence,
                    .segment_bytes = superblock.segment_bytes,
                    .opened = superblock.opened,
                    .first_life = superblock.first_life,
                    .segments = superblock.segments,
                    .spare = 0});
  finish(page);
}

Result<Superblock> decode_superblock(std::span<const std::byte, kSector> page) {
  if (std::all_of(page.begin(), page.end(), [](std::byte byte) { return byte == std::byte{0}; })) {
    return fail(Errc::kGone, "the page is empty");
  }
  const auto raw = raw_at<RawSuperblock>(page);
  if (raw.head.magic != kSuperblockMagic) {
    return fail(Errc::kRefused, "the file begins with bytes of another program");
  }
  if (!is_valid(page, kSuperblockMagic, raw.head.disk)) {
    return fail(Errc::kCorrupt, "the superblock is damaged");
  }
  if (raw.format != kFormat) {
    return fail(Errc::kRefused, "the file has format {}, and this program reads format {}",
                raw.format, kFormat);
  }
  if (!is_possible(raw)) return fail(Errc::kCorrupt, "the superblock has impossible values");
  return Superblock{.disk = raw.head.disk,
                    .sequence = raw.sequence,
                    .segment_bytes = raw.segment_bytes,
                    .table_pages = raw.table_pages,
                    .segments = raw.segments,
                    .opened = raw.opened,
                    .first_life = raw.first_life};
}

Result<Superblock> newer(const Result<Superblock>& a, const Result<Superblock>& b) {
  if (!a) return b ? b : a;
  return b && b->sequence > a->sequence ? b : a;
}

void encode(const Names& names, const Id128& disk, std::span<std::byte, kNamesBytes> area) {
  PEGA_ASSERT(names.records.size() <= kMostNames, "{} names", names.records.size());
  clear(area);
  put(area, RawNames{.head = {.magic = kNamesMagic, .checksum = {}, .disk = disk},
                     .sequence = names.sequence,
                     .count = static_cast<std::uint32_t>(names.records.size()),
                     .next_number = names.next_number,
                     .spare = {}});
  for (std::size_t i = 0; i < names.records.size(); ++i) {
    const NameRecord& record = names.records[i];
    put(area,
        RawName{.name = record.origin.name,
                .counter = record.origin.epoch.counter,
                .id = record.origin.epoch.id,
                .number = record.number,
                .kind = record.origin.kind,
                .used_at = record.used_at,
                .spare = 0},
        sizeof(RawNames) + i * sizeof(RawName));
  }
  finish(area);
}

std::optional<Names> decode_names(std::span<const std::byte, kNamesBytes> area, const Id128& disk) {
  if (!is_valid(area, kNamesMagic, disk)) return std::nullopt;
  const auto raw = raw_at<RawNames>(area);
  if (raw.count > kMostNames || raw.next_number == 0) return std::nullopt;
  Names names{.sequence = raw.sequence, .next_number = raw.next_number, .records = {}};
  std::set<std::uint16_t> numbers;
  std::set<SpaceName> seen;
  for (std::size_t i = 0; i < raw.count; ++i) {
    const auto each = raw_at<RawName>(area, sizeof(RawNames) + i * sizeof(RawName));
    if (each.number == 0 || !numbers.insert(each.number).second || !seen.insert(each.name).second) {
      return std::nullopt;
    }
    names.records.push_back({.origin = {.name = each.name,
                                        .kind = each.kind,
                                        .epoch = {.counter = each.counter, .id = each.id}},
                             .number = each.number,
                             .used_at = each.used_at});
  }
  return names;
}

void encode(const SegmentHeader& header, const Id128& disk, std::span<std::byte, kSector> page) {
  clear(page);
  put(page, RawSegment{.head = {.magic = kSegmentMagic, .checksum = {}, .disk = disk},
                       .life = header.life,
                       .segment = header.segment,
                       .spare = 0});
  finish(page);
}

std::optional<SegmentHeader> decode_segment_header(std::span<const std::byte, kSector> page,
                                                   const Id128& disk) {
  if (!is_valid(page, kSegmentMagic, disk)) return std::nullopt;
  const auto raw = raw_at<RawSegment>(page);
  return SegmentHeader{.segment = raw.segment, .life = raw.life};
}

void encode(const TablePage& page, const Id128& disk, std::span<std::byte, kSector> to) {
  PEGA_ASSERT(page.entries.size() <= kEntriesPerPage, "{} entries", page.entries.size());
  clear(to);
  put(to, RawTable{.head = {.magic = kTableMagic, .checksum = {}, .disk = disk},
                   .life = page.life,
                   .page = page.page,
                   .count = static_cast<std::uint32_t>(page.entries.size()),
                   .spare = 0});
  for (std::size_t i = 0; i < page.entries.size(); ++i) {
    const Entry& entry = page.entries[i];
    put(to,
        RawEntry{.key = entry.key,
                 .proof = entry.proof,
                 .place = entry.place,
                 .units = entry.units,
                 .number = entry.number,
                 .kind = entry.kind,
                 .depth = entry.depth,
                 .flags = entry.flags,
                 .saved_at = entry.saved_at,
                 .spare = 0},
        sizeof(RawTable) + i * sizeof(RawEntry));
  }
  finish(to);
}

std::optional<TablePage> decode_table_page(std::span<const std::byte, kSector> page,
                                           const Id128& disk) {
  if (!is_valid(page, kTableMagic, disk)) return std::nullopt;
  const auto raw = raw_at<RawTable>(page);
  if (raw.count > kEntriesPerPage) return std::nullopt;
  TablePage decoded{.life = raw.life, .page = raw.page, .entries = {}};
  decoded.entries.reserve(raw.count);
  for (std::size_t i = 0; i < raw.count; ++i) {
    const auto each = raw_at<RawEntry>(page, sizeof(RawTable) + i * sizeof(RawEntry));
    decoded.entries.push_back({.key = each.key,
                               .proof = each.proof,
                               .place = each.place,
                               .units = each.units,
                               .number = each.number,
                               .kind = each.kind,
                               .depth = each.depth,
                               .flags = each.flags,
                               .saved_at = each.saved_at});
  }
  return decoded;
}

bool lies_in(const Entry& entry, const Superblock& superblock, std::uint32_t segment) {
  const std::uint64_t begin = superblock.segment_offset(segment) + superblock.head_bytes();
  const std::uint64_t end = superblock.segment_offset(segment) + superblock.segment_bytes;
  const std::uint64_t first = std::uint64_t{entry.place} * kSector;
  const std::uint64_t bytes = std::uint64_t{entry.units} * kSector;
  return entry.units != 0 && first >= begin && first <= end && bytes <= end - first;
}

}  // namespace pegaflow::engine::ssd
