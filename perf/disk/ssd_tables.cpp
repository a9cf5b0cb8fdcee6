#include "perf/disk/ssd_tables.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <span>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "base/id128.h"
#include "base/os/unique_fd.h"
#include "engine/ssd/format.h"
#include "engine/ssd/names.h"
#include "engine/ssd/segment_log.h"
#include "perf/lib/keys.h"

namespace pegaflow::perf {
namespace {

namespace ssd = engine::ssd;

constexpr std::uint64_t kSegmentBytes = std::uint64_t{128} << 20;
/// The lives of a disk's first opening.
constexpr std::uint64_t kFirstLife = std::uint64_t{1} << 32;

class Writer {
 public:
  Writer(UniqueFd fd, const ssd::Superblock& superblock)
      : fd_(std::move(fd)), superblock_(superblock), log_(superblock) {}

  Result<void> write_head(const ssd::NameTable& names) {
    std::array<std::byte, ssd::kSector> page{};
    ssd::encode(superblock_, page);
    for (const std::uint64_t offset : ssd::kSuperblockOffsets) PEGA_TRY(write(offset, page));
    std::vector<std::byte> area(ssd::kNamesBytes);
    ssd::encode(names.save(), superblock_.disk, std::span(area).first<ssd::kNamesBytes>());
    for (const std::uint64_t offset : ssd::kNamesOffsets) PEGA_TRY(write(offset, area));
    return {};
  }

  Result<void> add(const BlockKey& key, std::uint16_t number, std::uint64_t proof,
                   std::uint64_t block_bytes) {
    auto room = log_.take(block_bytes);
    if (!room) {
      PEGA_TRY(begin_segment());
      room = log_.take(block_bytes);
    }
    if (!room) return fail(Errc::kInternal, "a segment has no room for a block");
    log_.wrote(*room, {.key = key,
                       .proof = proof,
                       .place = static_cast<std::uint32_t>(room->offset / ssd::kSector),
                       .units = static_cast<std::uint32_t>(block_bytes / ssd::kSector),
                       .number = number,
                       .depth = ssd::Entry::kUnknownDepth,
                       .saved_at = 1});
    return write_tables(false);
  }

  Result<void> end() {
    log_.close();
    PEGA_TRY(write_tables(true));
    if (::fsync(fd_.get()) != 0) return fail_errno(errno, "flush the tables");
    return {};
  }

 private:
  Result<void> begin_segment() {
    log_.close();
    PEGA_TRY(write_tables(true));
    const auto next = log_.next();
    if (!next) return fail(Errc::kInternal, "the file has no further segment");
    const std::uint64_t life = kFirstLife + lives_++;
    log_.open(*next, life);
    std::array<std::byte, ssd::kSector> page{};
    ssd::encode(ssd::SegmentHeader{.segment = *next, .life = life}, superblock_.disk, page);
    PEGA_TRY(write(superblock_.segment_offset(*next), page));
    (void)log_.header_written(*next);
    return {};
  }

  Result<void> write_tables(bool all) {
    while (const auto table = log_.next_table(all)) {
      std::array<std::byte, ssd::kSector> page{};
      ssd::encode(table->page, superblock_.disk, page);
      PEGA_TRY(write(table->offset, page));
      (void)log_.table_written(table->segment);
    }
    return {};
  }

  Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) {
    const ssize_t written =
        ::pwrite(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written == static_cast<ssize_t>(bytes.size())) return {};
    return fail_errno(written < 0 ? errno : ENOSPC, "write a table");
  }

  UniqueFd fd_;
  ssd::Superblock superblock_;
  ssd::SegmentLog log_;
  std::uint64_t lives_ = 0;
};

}  // namespace

Result<SsdTables> write_ssd_tables(const std::string& path, std::uint64_t blocks,
                                   std::uint64_t block_bytes, std::uint64_t seed) {
  // Of any number of segments, to learn how many blocks each takes.
  const Id128 disk = Id128::random();
  PEGA_TRY_LET(const ssd::Superblock two,
               ssd::divide(disk, ssd::kLogOffset + 2 * kSegmentBytes, kSegmentBytes));
  const std::uint64_t each =
      std::min<std::uint64_t>(two.most_entries(), (kSegmentBytes - two.head_bytes()) / block_bytes);
  const std::uint64_t segments = (blocks + each - 1) / std::max<std::uint64_t>(1, each) + 2;
  const std::uint64_t file_bytes = ssd::kLogOffset + segments * kSegmentBytes;
  PEGA_TRY_LET(ssd::Superblock superblock, ssd::divide(disk, file_bytes, kSegmentBytes));
  superblock.sequence = 1;
  superblock.opened = 1;
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(file_bytes)) != 0) {
    return fail_errno(errno, "make " + path);
  }
  ssd::NameTable names;
  const auto number = names.number({}, 1);
  if (!number) return fail(Errc::kInternal, "the names have no room");
  Writer writer(std::move(fd), superblock);
  PEGA_TRY(writer.write_head(names));
  const KeySource keys(seed);
  for (std::uint64_t i = 0; i < blocks; ++i) {
    PEGA_TRY(writer.add(keys.key(i), *number, i + 1, block_bytes));
  }
  PEGA_TRY(writer.end());
  return SsdTables{
      .file_bytes = file_bytes,
      .log_offset = ssd::kLogOffset,
      .segment_bytes = kSegmentBytes,
      .segments = segments,
      .table_bytes = (1 + (each + ssd::kEntriesPerPage - 1) / ssd::kEntriesPerPage) * ssd::kSector};
}

}  // namespace pegaflow::perf
