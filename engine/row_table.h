#pragma once
/// \file
/// Rows that come and go, named by small numbers.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace pegaflow {

/// A table whose rows keep their number and address for life. Growth never moves rows, because
/// moving 100,000 of them would stall the loop. A number is used again after its row was removed:
/// who keeps numbers for longer compares a serial number that the row carries.
template <typename Row>
class RowTable {
 public:
  /// The number of a new row, value-initialised.
  [[nodiscard]] std::uint32_t add() {
    ++size_;
    if (free_.empty()) {
      rows_.emplace_back();
      return static_cast<std::uint32_t>(rows_.size() - 1);
    }
    const std::uint32_t number = free_.back();
    free_.pop_back();
    return number;
  }
  void remove(std::uint32_t number) {
    rows_[number] = Row{};
    free_.push_back(number);
    --size_;
  }

  [[nodiscard]] Row& operator[](std::uint32_t number) noexcept { return rows_[number]; }
  [[nodiscard]] const Row& operator[](std::uint32_t number) const noexcept { return rows_[number]; }
  /// True for a number that add() ever gave out; its row may have been removed.
  [[nodiscard]] bool knows(std::uint32_t number) const noexcept { return number < rows_.size(); }
  /// Rows now.
  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t memory_bytes() const noexcept {
    return rows_.size() * sizeof(Row) + free_.capacity() * sizeof(std::uint32_t);
  }

 private:
  std::deque<Row> rows_;
  std::vector<std::uint32_t> free_;
  std::uint32_t size_ = 0;
};

}  // namespace pegaflow
