#include "engine/ssd/scan.h"

#include <algorithm>

namespace pegaflow::engine::ssd {

Scan::Scan(const Superblock& superblock, const NameTable& names, Index& index, SegmentLog& log)
    : superblock_(superblock), index_(index), log_(log), alive_(1U << 16) {
  for (const NameRecord& each : names.records()) alive_[each.number] = true;
}

std::optional<Scan::Read> Scan::next() {
  if (!more_.empty()) {
    const Read read = more_.back();
    more_.pop_back();
    return read;
  }
  if (next_segment_ == superblock_.segments) return std::nullopt;
  const std::uint32_t segment = next_segment_++;
  return Read{.segment = segment,
              .first_page = 0,
              .offset = superblock_.segment_offset(segment),
              .bytes = std::min(kFirstBytes, superblock_.head_bytes())};
}

void Scan::take(const Read& read, std::span<const std::byte> bytes) {
  if (read.first_page != 0) {
    take_pages(read, bytes);
    return;
  }
  const auto header = decode_segment_header(bytes.first<kSector>(), superblock_.disk);
  if (!header || header->segment != read.segment || header->life < superblock_.first_life) {
    end(read.segment);
    return;
  }
  greatest_life_ = std::max(greatest_life_, header->life);
  index_.begin(read.segment, header->life);
  log_.found(read.segment, header->life);
  take_pages(read, bytes.subspan(kSector));
}

void Scan::take_pages(const Read& read, std::span<const std::byte> pages) {
  std::uint32_t number = read.first_page;
  for (; pages.size() >= kSector; pages = pages.subspan(kSector), ++number) {
    const auto page = decode_table_page(pages.first<kSector>(), superblock_.disk);
    if (!page || page->life != index_.life(read.segment) || page->page != number) {
      if (!page && std::any_of(pages.begin(), pages.begin() + kSector,
                               [](std::byte byte) { return byte != std::byte{0}; })) {
        ++counts_.damaged_pages;
      }
      end(read.segment);
      return;
    }
    for (const Entry& entry : page->entries) {
      if (!lies_in(entry, superblock_, read.segment) || entry.proof == 0) continue;
      if (!alive_[entry.number]) {
        ++counts_.dead;
        continue;
      }
      index_.add(read.segment, {.fingerprint = fingerprint_of(entry.number, entry.key),
                                .proof = entry.proof,
                                .place = entry.place,
                                .number = entry.number,
                                .flags = entry.flags});
      ++counts_.blocks;
    }
    if (page->entries.size() < kEntriesPerPage) {
      end(read.segment);
      return;
    }
  }
  if (number == superblock_.table_pages) {
    end(read.segment);
    return;
  }
  more_.push_back({.segment = read.segment,
                   .first_page = number,
                   .offset = superblock_.segment_offset(read.segment) + (1 + number) * kSector,
                   .bytes = (superblock_.table_pages - number) * kSector});
}

void Scan::failed(const Read& read) {
  ++counts_.failed_reads;
  end(read.segment);
}

void Scan::end(std::uint32_t segment) {
  index_.close(segment);
  ++done_;
}

}  // namespace pegaflow::engine::ssd
