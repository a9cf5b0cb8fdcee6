#pragma once
/// \file
/// The reservations: by job, by deadline, and the forgotten ones whose writers may still write.

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/error.h"
#include "engine/flat_index.h"
#include "engine/row_table.h"
#include "engine/store_rows.h"

namespace pegaflow {

/// Keeps each job in its lists: by deadline, of its holder, of its space.
///
/// Forgetting a job is O(1), however many slots it has: a slot that is being written is in
/// quarantine when its job is forgotten.
class JobTable {
 public:
  static constexpr std::uint32_t kNone = FlatIndex::kNone;

  /// Errors: kOutOfCapacity.
  static Result<JobTable> create(std::uint32_t max_jobs);

  [[nodiscard]] bool is_full() const noexcept { return rows_.size() == max_jobs_; }
  [[nodiscard]] std::uint32_t size() const noexcept { return rows_.size(); }
  [[nodiscard]] std::uint32_t live_count() const noexcept { return by_deadline_.size(); }
  [[nodiscard]] std::uint32_t find(const JobId& id) const;
  /// A live job without slots. Its name is not in use and the table is not full.
  std::uint32_t add(const JobId& id, Holder& holder, Space& space, TimePoint deadline);
  /// A live job gets one slot more; one job less slots it had.
  void add_slot(std::uint32_t row, SlotIndex slot);
  SlotIndex pop_slot(std::uint32_t row);
  /// A live job becomes a forgotten one: `fate` is kForgotten or kWriterLost.
  void forget(std::uint32_t row, Job::Fate fate);
  /// A live or forgotten job is ended: its name is free and it is in no list.
  void end(std::uint32_t row);
  /// Removes an ended job that has no slot left.
  void remove(std::uint32_t row);

  [[nodiscard]] const Job& operator[](std::uint32_t row) const noexcept { return rows_[row]; }
  [[nodiscard]] bool knows(std::uint32_t row) const noexcept { return rows_.knows(row); }
  /// The live job whose deadline comes first, or kNone.
  [[nodiscard]] std::uint32_t first_due() const noexcept { return by_deadline_.front(); }
  /// Slots of all jobs with that fate.
  [[nodiscard]] std::uint32_t slots(Job::Fate fate) const noexcept {
    return slots_[static_cast<std::size_t>(fate)];
  }
  [[nodiscard]] std::uint64_t memory_bytes() const noexcept {
    return rows_.memory_bytes() + by_id_.memory_bytes();
  }

 private:
  JobTable(std::uint32_t max_jobs, FlatIndex by_id);
  void leave_live(Job& job, std::uint32_t row);
  void set_fate(Job& job, Job::Fate fate);
  [[nodiscard]] std::uint32_t& slots_of(Job::Fate fate) noexcept {
    return slots_[static_cast<std::size_t>(fate)];
  }

  std::uint32_t max_jobs_;
  RowTable<Job> rows_;
  FlatIndex by_id_;
  IndexList<&Job::by_deadline> by_deadline_;  ///< One timeout for all: the order of adding.
  std::array<std::uint32_t, 4> slots_{};      ///< By fate.
};

}  // namespace pegaflow
