#pragma once
/// \file
/// The leases: by name, by age, and by expiry.

#include <cstdint>
#include <set>
#include <utility>

#include "base/clock.h"
#include "engine/rights/rows.h"
#include "engine/tables/index_list.h"
#include "engine/tables/row_table.h"

namespace pegaflow::engine {

/// Keeps each lease in its lists. A name contains its row in its low bits, and a serial number
/// above. Thread-bound.
class LeaseTable {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  static constexpr unsigned kRowBits = 20;

  /// `max_leases` is at most 2^kRowBits.
  explicit LeaseTable(std::uint32_t max_leases) : max_leases_(max_leases) {}

  [[nodiscard]] bool is_full() const noexcept { return rows_.size() == max_leases_; }
  [[nodiscard]] std::uint32_t size() const noexcept { return rows_.size(); }
  /// The row of the lease while it lives, or kNone.
  [[nodiscard]] std::uint32_t find(LeaseId id) const;
  /// The table is not full. Its name and lists are set here.
  LeaseId add(Lease lease);
  /// Removes the lease from every list and returns it.
  Lease remove(std::uint32_t row);

  [[nodiscard]] const Lease& operator[](std::uint32_t row) const noexcept { return rows_[row]; }
  /// kNone when there is none.
  [[nodiscard]] std::uint32_t oldest() const noexcept { return by_age_.front(); }
  [[nodiscard]] std::uint32_t newer(std::uint32_t row) const { return by_age_.next(rows_, row); }
  /// The lease that expires first, or kNone.
  [[nodiscard]] std::uint32_t first_due() const {
    return by_end_.empty() ? kNone : find(by_end_.begin()->second);
  }
  /// The count of leases that are listed by their end: equal to size().
  [[nodiscard]] std::size_t due_count() const noexcept { return by_end_.size(); }
  /// Lent blocks and bytes, counted once per lease.
  [[nodiscard]] std::uint64_t blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    constexpr std::uint64_t kTreeNode = 64;
    return rows_.memory_bytes() + by_end_.size() * kTreeNode;
  }

 private:
  std::uint32_t max_leases_;
  std::uint64_t next_serial_ = 1;
  RowTable<Lease> rows_;
  IndexList<&Lease::by_age> by_age_;  ///< Oldest first.
  /// Readers choose the duration of each lease, so leases do not expire in the order in which they
  /// were made.
  std::set<std::pair<TimePoint, LeaseId>> by_end_;
  std::uint64_t blocks_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace pegaflow::engine
