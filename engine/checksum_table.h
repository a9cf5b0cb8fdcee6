#pragma once
/// \file
/// Checksums of pages in the pool, for those whose writer took one.

#include <cstdint>
#include <optional>

#include "engine/block_store.h"
#include "engine/zero_pages.h"

namespace pegaflow {

/// One checksum for each place of a page, or none. Beside the store, which needs no checksum for
/// anything: who publishes brings them and who opens is given them.
///
/// 8 bytes a page, and none before the first checksum: where no engine verifies it costs nothing.
/// A place keeps its checksum until it is cleared, so whoever hands a slot out clears it.
/// Thread-bound.
class ChecksumTable {
 public:
  static constexpr std::uint64_t kNone = 0;

  /// `slots`: places below that.
  explicit ChecksumTable(std::uint64_t slots) : slots_(slots) {}

  /// Places that are none are fine. Without memory for the table nothing is kept, one warning says
  /// so, and the pages count as saved without a checksum.
  void set(SlotIndex slot, std::uint64_t checksum);
  void clear(SlotIndex slot) {
    if (slot < touched_) set(slot, kNone);
  }
  [[nodiscard]] std::uint64_t operator[](SlotIndex slot) const {
    return slot < touched_ ? (*checksums_)[slot] : kNone;
  }

  /// Of the places up to the highest that ever had one.
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return touched_ * sizeof(std::uint64_t);
  }

 private:
  std::uint64_t slots_;
  std::uint64_t touched_ = 0;  ///< Places below have been written.
  bool has_failed_ = false;
  std::optional<ZeroPages<std::uint64_t>> checksums_;
};

}  // namespace pegaflow
