#pragma once
/// \file
/// Checksums of pages in the pool, for engines that verify the pages that they load.

#include <cstdint>
#include <optional>

#include "engine/kept/kept_tables.h"
#include "engine/tables/zero_pages.h"

namespace pegaflow::engine {

/// The checksum of each page that was saved with one, by the number of the page (see
/// BlockStore::page_number()). The block store itself uses no checksums: CacheService sets them
/// when a block is published or fetched, and returns them when it is opened or lent.
///
/// Costs at most 8 bytes per page, and nothing before the first checksum is set. A number keeps its
/// checksum until it is cleared, even if the page is reused: the caller clears it when it reserves
/// the page for another block. Thread-bound.
class ChecksumTable {
 public:
  static constexpr std::uint64_t kNone = 0;

  /// Page numbers are below `pages`.
  /// In memory of `kept`, unless that is null: with the checksums that it has, which outlive this
  /// process.
  explicit ChecksumTable(std::uint64_t pages, const KeptTables* kept = nullptr) : pages_(pages) {
    if (kept == nullptr) return;
    pages_ = kept->checksums().size();
    kept_ = &kept->checksum_count();
    checksums_ = ZeroPages<std::uint64_t>::shared(kept->checksums());
  }
  ChecksumTable(ChecksumTable&&) = delete;

  /// Ignores numbers that are out of range. If the table cannot be allocated, no checksum is kept,
  /// one warning is logged, and pages count as saved without a checksum.
  void set(std::uint32_t page, std::uint64_t checksum);
  void clear(std::uint32_t page) { set(page, kNone); }
  [[nodiscard]] std::uint64_t operator[](std::uint32_t page) const {
    return *kept_ != 0 && page < pages_ ? (*checksums_)[page] : kNone;
  }

  [[nodiscard]] bool is_empty() const noexcept { return *kept_ == 0; }
  /// The size of the checksums that are set.
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return *kept_ * sizeof(std::uint64_t);
  }

 private:
  std::uint64_t pages_;
  std::uint64_t own_kept_ = 0;
  std::uint64_t* kept_ = &own_kept_;  ///< The count of checksums that are set.
  bool has_failed_ = false;
  std::optional<ZeroPages<std::uint64_t>> checksums_;
};

}  // namespace pegaflow::engine
