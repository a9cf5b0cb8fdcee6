#pragma once
/// \file
/// Checksums of pages in the pool, for engines that verify.

#include <cstdint>
#include <optional>

#include "engine/tables/zero_pages.h"

namespace pegaflow::engine {

/// One checksum for each page in the pool, or none. The table stands beside the store, which needs
/// no checksums: publish() brings them and open() returns them. A page is named by its number: see
/// BlockStore::page_number().
///
/// 8 bytes per page, and none before the first checksum: where no engine verifies it costs nothing.
/// A number keeps its checksum until it is cleared, so a caller that hands out a page clears it.
/// Thread-bound.
class ChecksumTable {
 public:
  static constexpr std::uint64_t kNone = 0;

  /// Page numbers are below `pages`.
  explicit ChecksumTable(std::uint64_t pages) : pages_(pages) {}

  /// Unknown numbers are ignored. Without memory for the table no checksum is kept, one warning is
  /// logged, and the pages count as saved without a checksum.
  void set(std::uint32_t page, std::uint64_t checksum);
  void clear(std::uint32_t page) { set(page, kNone); }
  [[nodiscard]] std::uint64_t operator[](std::uint32_t page) const {
    return checksums_ && page < pages_ ? (*checksums_)[page] : kNone;
  }

  [[nodiscard]] bool is_empty() const noexcept { return kept_ == 0; }
  /// Bytes of the checksums that are kept.
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return kept_ * sizeof(std::uint64_t);
  }

 private:
  std::uint64_t pages_;
  std::uint64_t kept_ = 0;
  bool has_failed_ = false;
  std::optional<ZeroPages<std::uint64_t>> checksums_;
};

}  // namespace pegaflow::engine
