#include "engine/ssd/scan.h"

#include <algorithm>
#include <array>

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
              .bytes = has_long_tables_ ? superblock_.head_bytes()
                                        : std::min(kFirstBytes, superblock_.head_bytes())};
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
    const bool is_last = page->entries.size() < kEntriesPerPage;
    if (number == read.first_page || is_last) {
      index_.expect(read.segment,
                    is_last ? page->entries.size() : pages.size() / kSector * kEntriesPerPage);
    }
    add(read.segment, page->entries);
    if (is_last) {
      has_long_tables_ = (2 + number) * kSector > kFirstBytes;
      end(read.segment);
      return;
    }
  }
  if (number == superblock_.table_pages) {
    has_long_tables_ = superblock_.head_bytes() > kFirstBytes;
    end(read.segment);
    return;
  }
  more_.push_back({.segment = read.segment,
                   .first_page = number,
                   .offset = superblock_.segment_offset(read.segment) + (1 + number) * kSector,
                   .bytes = (superblock_.table_pages - number) * kSector});
}

void Scan::add(std::uint32_t segment, std::span<const Entry> entries) {
  // The cells of all entries are read at the same time: they lie anywhere in the index.
  std::array<std::uint64_t, kEntriesPerPage> fingerprints{};
  for (std::size_t i = 0; i < entries.size(); ++i) {
    fingerprints[i] = fingerprint_of(entries[i].number, entries[i].key);
    index_.prefetch(fingerprints[i]);
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const Entry& entry = entries[i];
    if (!lies_in(entry, superblock_, segment) || entry.proof == 0) continue;
    if (!alive_[entry.number]) {
      ++counts_.dead;
      continue;
    }
    index_.add(segment, {.fingerprint = fingerprints[i],
                         .proof = entry.proof,
                         .place = entry.place,
                         .number = entry.number,
                         .flags = entry.flags});
    ++counts_.blocks;
  }
}

void Scan::failed(const Read& read) {
  ++counts_.failed_reads;
  if (read.first_page == 0 && read.bytes > kFirstBytes) {
    // A bad sector of a long table does not cost the pages before it.
    more_.push_back(
        {.segment = read.segment, .first_page = 0, .offset = read.offset, .bytes = kFirstBytes});
    return;
  }
  end(read.segment);
}

void Scan::end(std::uint32_t segment) {
  index_.close(segment);
  ++done_;
}

}  // namespace pegaflow::engine::ssd
