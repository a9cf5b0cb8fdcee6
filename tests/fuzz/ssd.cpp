// libFuzzer: any bytes as a record of an SSD.
//
// The first byte chooses the record. Half of the inputs get a valid magic, disk and checksum, so
// that the fields behind them are reached. What is decoded obeys the limits of the format, and is
// encoded into bytes that decode to the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/assert.h"
#include "engine/ssd/format.h"
#include "engine/types/hash.h"

namespace pegaflow::engine::ssd {
namespace {

constexpr Id128 kDisk{11, 12};

/// Gives the record the head that its decoder demands; `valid` is any valid record of the kind.
void repair(std::span<std::byte> record, std::span<const std::byte> valid) {
  constexpr std::size_t kDiskAt = 24;  // Behind magic and checksum.
  std::copy_n(valid.begin(), 8, record.begin());
  std::memcpy(record.data() + kDiskAt, &kDisk, sizeof kDisk);
  const Checksum checksum = hash128(record.subspan(kDiskAt));
  std::memcpy(record.data() + 8, &checksum, sizeof checksum);
}

template <std::size_t kBytes, typename Encode>
std::vector<std::byte> record_of(std::span<const std::byte> input, bool is_repaired,
                                 Encode&& encode_valid) {
  std::vector<std::byte> record(kBytes);
  std::copy_n(input.begin(), std::min(input.size(), kBytes), record.begin());
  if (is_repaired) {
    std::vector<std::byte> valid(kBytes);
    encode_valid(std::span<std::byte, kBytes>(valid.data(), kBytes));
    repair(record, valid);
  }
  return record;
}

void superblock(std::span<const std::byte> input, bool is_repaired) {
  const auto record = record_of<kSector>(input, is_repaired, [](auto page) {
    encode(divide(kDisk, std::uint64_t{1} << 30, kLeastSegment).value(), page);
  });
  const auto decoded =
      decode_superblock(std::span<const std::byte, kSector>(record.data(), kSector));
  if (!decoded) return;
  PEGA_ASSERT(decoded->head_bytes() < decoded->segment_bytes, "a segment without room");
  PEGA_ASSERT(decoded->end() > decoded->segment_offset(decoded->segments - 1), "an overflow");
  std::vector<std::byte> again(kSector);
  encode(*decoded, std::span<std::byte, kSector>(again.data(), kSector));
  PEGA_ASSERT(
      *decode_superblock(std::span<const std::byte, kSector>(again.data(), kSector)) == *decoded,
      "a superblock changed");
}

void names(std::span<const std::byte> input, bool is_repaired) {
  const auto record =
      record_of<kNamesBytes>(input, is_repaired, [](auto area) { encode(Names{}, kDisk, area); });
  const auto decoded =
      decode_names(std::span<const std::byte, kNamesBytes>(record.data(), kNamesBytes), kDisk);
  if (!decoded) return;
  PEGA_ASSERT(decoded->records.size() <= kMostNames, "{} names", decoded->records.size());
  std::vector<std::byte> again(kNamesBytes);
  encode(*decoded, kDisk, std::span<std::byte, kNamesBytes>(again.data(), kNamesBytes));
  const auto same =
      decode_names(std::span<const std::byte, kNamesBytes>(again.data(), kNamesBytes), kDisk);
  PEGA_ASSERT(same && same->records == decoded->records, "names changed");
}

void table(std::span<const std::byte> input, bool is_repaired) {
  const auto record =
      record_of<kSector>(input, is_repaired, [](auto page) { encode(TablePage{}, kDisk, page); });
  const auto decoded =
      decode_table_page(std::span<const std::byte, kSector>(record.data(), kSector), kDisk);
  if (!decoded) return;
  PEGA_ASSERT(decoded->entries.size() <= kEntriesPerPage, "{} entries", decoded->entries.size());
  const Superblock disk = divide(kDisk, std::uint64_t{1} << 30, kLeastSegment).value();
  for (const Entry& entry : decoded->entries) {
    if (!lies_in(entry, disk, 3)) continue;
    const std::uint64_t end = (std::uint64_t{entry.place} + entry.units) * kSector;
    PEGA_ASSERT(end <= disk.segment_offset(4), "an entry ends at {}", end);
  }
  std::vector<std::byte> again(kSector);
  encode(*decoded, kDisk, std::span<std::byte, kSector>(again.data(), kSector));
  const auto same =
      decode_table_page(std::span<const std::byte, kSector>(again.data(), kSector), kDisk);
  PEGA_ASSERT(same && same->entries == decoded->entries, "a table page changed");
}

}  // namespace
}  // namespace pegaflow::engine::ssd

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace ssd = pegaflow::engine::ssd;
  if (size < 1) return 0;
  const auto input = std::as_bytes(std::span(data + 1, size - 1));
  const bool is_repaired = (data[0] & 1U) != 0;
  switch (data[0] >> 1U & 3U) {
    case 0:
      ssd::superblock(input, is_repaired);
      break;
    case 1:
      ssd::names(input, is_repaired);
      break;
    default:
      ssd::table(input, is_repaired);
      break;
  }
  return 0;
}
