#pragma once
/// \file
/// Rows that are added and removed, named by small numbers.

#include <cstddef>
#include <cstdint>
#include <deque>

namespace pegaflow::engine {

/// A table whose rows keep their number and address for life. Growth never moves rows, because
/// moving 100,000 of them would stall the event loop, and removal needs no memory: free rows are a
/// list through the rows themselves. A number is reused after its row was removed: a caller that
/// keeps numbers for longer compares a serial number that the row carries.
template <typename Row>
class RowTable {
 public:
  /// The number of a new row, value-initialised.
  [[nodiscard]] std::uint32_t add() {
    ++size_;
    if (first_free_ == kNone) {
      rows_.emplace_back();
      return static_cast<std::uint32_t>(rows_.size() - 1);
    }
    const std::uint32_t number = first_free_;
    first_free_ = rows_[number].next_free;
    return number;
  }
  void remove(std::uint32_t number) {
    rows_[number].row = Row{};
    rows_[number].next_free = first_free_;
    first_free_ = number;
    --size_;
  }

  [[nodiscard]] Row& operator[](std::uint32_t number) noexcept { return rows_[number].row; }
  [[nodiscard]] const Row& operator[](std::uint32_t number) const noexcept {
    return rows_[number].row;
  }
  /// True for a number that add() ever returned; its row may have been removed.
  [[nodiscard]] bool knows(std::uint32_t number) const noexcept { return number < rows_.size(); }
  /// The current count of rows.
  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t memory_bytes() const noexcept { return rows_.size() * sizeof(Entry); }

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  struct Entry {
    Row row{};
    std::uint32_t next_free = kNone;  ///< Used while the row is free.
  };

  std::deque<Entry> rows_;
  std::uint32_t first_free_ = kNone;
  std::uint32_t size_ = 0;
};

}  // namespace pegaflow::engine
