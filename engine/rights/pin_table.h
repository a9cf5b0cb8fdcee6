#pragma once
/// \file
/// The pins: by (holder, name), and by age.

#include <cstdint>
#include <span>

#include "base/error.h"
#include "engine/rights/rows.h"
#include "engine/tables/flat_index.h"
#include "engine/tables/row_table.h"

namespace pegaflow::engine {

/// Keeps each pin in its lists: by age, and of its holder.
class PinTable {
 public:
  static constexpr std::uint32_t kNone = FlatIndex::kNone;

  /// Errors: kOutOfCapacity.
  static Result<PinTable> create(std::uint32_t max_pins);

  [[nodiscard]] bool is_full() const noexcept { return rows_.size() == max_pins_; }
  [[nodiscard]] std::uint32_t size() const noexcept { return rows_.size(); }
  [[nodiscard]] std::uint32_t find(HolderId holder, PinId name) const;
  /// Its name is not in use by that holder and the table is not full.
  std::uint32_t add(Pin pin);
  /// Adds blocks after those that the pin has.
  void extend(std::uint32_t row, std::span<const FrameIndex> more);
  /// Removes the pin from every list and returns it.
  Pin remove(std::uint32_t row);

  /// The holder's connection ended: from now on its pins count as those of a lost reader.
  void holder_lost(const Holder& holder) { blocks_of_lost_ += holder.pinned_blocks; }
  /// Blocks pinned by lost holders, counted once per pin.
  [[nodiscard]] std::uint64_t blocks_of_lost() const noexcept { return blocks_of_lost_; }

  [[nodiscard]] const Pin& operator[](std::uint32_t row) const noexcept { return rows_[row]; }
  /// kNone when there is none.
  [[nodiscard]] std::uint32_t oldest() const noexcept { return by_age_.front(); }
  [[nodiscard]] std::uint32_t newer(std::uint32_t row) const { return by_age_.next(rows_, row); }
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return rows_.memory_bytes() + by_name_.memory_bytes();
  }

 private:
  PinTable(std::uint32_t max_pins, FlatIndex by_name);

  std::uint32_t max_pins_;
  RowTable<Pin> rows_;
  FlatIndex by_name_;
  IndexList<&Pin::by_age> by_age_;  ///< Oldest first.
  std::uint64_t blocks_of_lost_ = 0;
};

}  // namespace pegaflow::engine
